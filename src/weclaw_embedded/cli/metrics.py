"""metrics: the counts of a file for Prometheus, printed once or served."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import click

import weclaw_embedded as weclaw
from weclaw_embedded.cli import _common as common

__all__ = ["COMMANDS"]

# (metric, kind, field of `stats()`, help) of each topic and group …
_OF_A_GROUP = (
    ("weclaw_ready", "gauge", "ready", "Messages that may be delivered now."),
    ("weclaw_delayed", "gauge", "delayed", "Messages that wait for time, retry or key."),
    ("weclaw_leased", "gauge", "leased", "Messages in hand."),
    ("weclaw_dead", "gauge", "dead", "Dead letters."),
    ("weclaw_settled", "counter", "settled", "Acks since the group began."),
    ("weclaw_retries", "counter", "retries", "Failed deliveries that are tried again."),
    ("weclaw_oldest_age_seconds", "gauge", "oldest_age_s", "Age of the oldest not settled."),
)
# … and of the file.
_OF_THE_FILE = (
    ("weclaw_file_bytes", "gauge", "file_bytes", "Size of the file."),
    ("weclaw_reclaimable_bytes", "gauge", "reclaimable_bytes", "Space in it free for reuse."),
    ("weclaw_damaged", "gauge", "damaged", "Places that could not be read and were set aside."),
    ("weclaw_replica_lag_bytes", "gauge", "replica_lag", "Bytes the replica is behind."),
)


@click.command()
@common.file_argument
@click.option(
    "--serve",
    metavar="HOST:PORT",
    help="Serve them over HTTP until SIGTERM or Ctrl-C, as 127.0.0.1:9108.",
)
@common.json_option
@common.readonly_option
def metrics(file: str, serve: str | None, as_json: bool, readonly: bool) -> int:
    """Print the counts of FILE in the text format of Prometheus.

    Ends with 1, and weclaw_up is 0, if FILE can't be opened.
    """
    prometheus = _prometheus()
    registry = prometheus.CollectorRegistry()
    collector = _Collector(file, readonly=readonly)
    registry.register(collector)
    if serve is not None:
        if as_json:
            raise click.UsageError("what is served is text: leave --json out")
        address = _host_and_port(serve)
        common.must_exist(file)
        _serve(prometheus, registry, *address)
        return 0
    if as_json:
        common.print_json(
            [
                {"name": sample.name, "labels": sample.labels, "value": sample.value}
                for family in registry.collect()
                for sample in family.samples
            ]
        )
    else:
        text = prometheus.generate_latest(registry).decode("utf-8")
        if sys.stdout.isatty():
            text = "\n".join(map(common.plain, text.split("\n")))
        # With color: else click leaves out of a pipe what looks like one, and two names are one.
        click.echo(text, nl=False, color=True)
    if collector.error is not None:
        common.fail(collector.error)
    return 0


class _Collector:
    """Reads the file anew at each scrape, so that a file replaced meanwhile is no trouble."""

    def __init__(self, file: str, *, readonly: bool) -> None:
        self.error: str | None = None
        self._file = file
        self._readonly = readonly

    def describe(self) -> Iterable[Any]:
        """Nothing: what there is depends on the file."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds: dict[str, Any] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        self.error = None
        found: list[tuple[common.Place, weclaw.Stats]] = []
        try:
            with common.looking(self._file, readonly=self._readonly) as store:
                found = [
                    (place, common.queue_of(store, place.topic, place.group).stats())
                    for place in common.places(store, None, None)
                ]
        except (common.Failure, weclaw.WeclawError, OSError) as error:
            self.error = common.in_one_line(error)
        yield GaugeMetricFamily(
            "weclaw_up", "Whether the file could be opened.", value=int(self.error is None)
        )
        if not found:
            return
        for name, kind, field, text in _OF_A_GROUP:
            family = kinds[kind](name, text, labels=["topic", "group"])
            for place, stats in found:
                family.add_metric([place.topic, place.group], getattr(stats, field))
            yield family
        paused = GaugeMetricFamily(
            "weclaw_paused", "Whether deliveries are paused.", labels=["topic", "group"]
        )
        for place, _ in found:
            paused.add_metric([place.topic, place.group], int(place.paused))
        yield paused
        for name, kind, field, text in _OF_THE_FILE:
            value = getattr(found[0][1], field)
            if value is not None:
                yield kinds[kind](name, text, value=value)


def _serve(prometheus: Any, registry: Any, host: str, port: int) -> None:
    try:
        server, thread = prometheus.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        common.fail(f"{host}:{port} can't be served ({error.strerror}); choose another --serve")
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    click.echo(f"serving http://{host}:{server.server_port}/metrics", err=True)
    while not told.wait(1.0):  # in short waits, so that signals are seen on every platform
        pass
    server.shutdown()
    with contextlib.suppress(RuntimeError):
        thread.join(5.0)


def _host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (colon and not host):
        raise click.UsageError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:9108")
    return host.strip("[]") or "127.0.0.1", int(port)


def _prometheus() -> Any:
    try:
        import prometheus_client
    except ModuleNotFoundError:
        common.fail(
            "prometheus-client is not installed; metrics needs the extra 'metrics': "
            "pip install 'weclaw-embedded[metrics]'"
        )
    return prometheus_client


COMMANDS = [metrics]
