"""The door to the operating system: what it promises, on real files and with real processes."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weclaw_embedded import _clock, _disk, _files, errors
from weclaw_embedded.errors import DiskFullError

LINUX = sys.platform == "linux"


@pytest.fixture
def file(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    fd = _files.open_rw(str(path))
    yield fd
    _files.close(fd)


def test_a_read_is_short_only_where_the_file_ends(file: int) -> None:
    """read_at gives what was asked for, or all there is before the end."""
    _files.write_at(file, [b"0123456789"], 0)
    assert _files.read_at(file, 4, 3) == b"3456"
    assert _files.read_at(file, 100, 8) == b"89"
    assert _files.read_at(file, 5, 50) == b""


def test_a_write_of_many_buffers_writes_all_in_order(file: int) -> None:
    """Empty buffers, and more of them than one call can take, make no difference."""
    buffers = [b"", *(bytes([n % 251]) * (n % 7) for n in range(3000)), memoryview(b"end")]
    n = _files.write_at(file, buffers, 5)
    assert n == sum(map(len, buffers))
    assert _files.read_at(file, n + 5, 0) == bytes(5) + b"".join(buffers)


@pytest.mark.parametrize("n_buffers", [1, 5])
def test_a_short_write_is_continued(
    file: int, monkeypatch: pytest.MonkeyPatch, n_buffers: int
) -> None:
    """The system may write less than asked; write_at goes on until all is written."""
    real_pwrite, real_pwritev = os.pwrite, os.pwritev
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_pwrite(fd, data[:3], at))
    monkeypatch.setattr(
        os, "pwritev", lambda fd, views, at: real_pwritev(fd, [b"".join(views)[:3]], at)
    )
    buffers = [b"abcdefg"] * n_buffers
    assert _files.write_at(file, buffers, 1) == 7 * n_buffers
    assert _files.read_at(file, 100, 1) == b"abcdefg" * n_buffers


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_every_way_of_saying_full_is_disk_full_error(
    file: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No space, no quota and the file size limit are one error, others stay what they are."""

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(DiskFullError):
        _files.write_at(file, [b"x"], 0)
    with pytest.raises(DiskFullError):
        _files.zero_fill(file, 0, 10)
    number = errno.EIO
    with pytest.raises(OSError) as caught:
        _files.write_at(file, [b"x"], 0)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_sync_that_fails_is_never_called_a_full_disk(
    file: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whoever takes it for one makes room and is told that all is well the next time."""

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    for name, sync in (("fdatasync", _files.sync_data), ("fsync", _files.sync_all)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError) as caught:
                sync(file)
        assert caught.value.errno == number


def test_the_file_size_limit_is_disk_full_and_leaves_the_old_size(tmp_path: Path) -> None:
    """A process at its RLIMIT_FSIZE gets DiskFullError, and the file isn't left half extended."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    code = (
        "import resource, sys\n"
        "from weclaw_embedded import _files\n"
        "from weclaw_embedded.errors import DiskFullError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"fd = _files.open_rw({str(path)!r})\n"
        "try:\n"
        "    _files.zero_fill(fd, 1000, 3 << 20)\n"
        "except DiskFullError:\n"
        "    sys.exit(7)\n"
    )
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), check=False)
    assert done.returncode == 7
    assert path.read_bytes() == b"x" * 1000


def _environment() -> dict[str, str]:
    source = str(Path(_files.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": source}


def test_beginning_a_sync_changes_nothing_and_fails_for_nobody(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't be begun is left to the sync, which says what went wrong."""
    _files.write_at(file, [b"there"], 0)
    _files.begin_sync(file)
    _files.sync_data(file)
    assert _files.read_at(file, 10, 0) == b"there"
    read_end, write_end = os.pipe()
    _files.begin_sync(write_end)
    os.close(read_end)
    os.close(write_end)
    _files.begin_sync(write_end)  # closed meanwhile by another thread
    with pytest.raises(OSError):
        _files.sync_data(write_end)
    monkeypatch.setattr(_files, "libc", lambda name: None)
    _files._sync_file_range.cache_clear()
    _files.begin_sync(file)
    _files._sync_file_range.cache_clear()


def test_zero_fill_writes_zeros_that_have_their_space(file: int) -> None:
    """After zero_fill the range reads as zeros and has no hole; a punched one has."""
    _files.write_at(file, [b"x" * 100], 200_000)
    _files.zero_fill(file, 4096, 196_608)
    assert _files.read_at(file, 196_608, 4096) == bytes(196_608)
    if LINUX:
        assert not _files.has_hole(file, 4096, 190_000)
        if _files.punch(file, 8192, 65536):
            assert _files.has_hole(file, 4096, 190_000)
            assert _files.read_at(file, 65536, 8192) == bytes(65536)
            assert _files.size(file) == 200_704


def test_identity_tells_files_apart_even_in_one_inode(tmp_path: Path) -> None:
    """An open file and its path have one identity; another file has another."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.touch()
    two.touch()
    fd = _files.open_ro(str(one))
    try:
        assert _disk.identity(fd) == _disk.identity(str(one))
        assert _disk.identity(fd) != _disk.identity(str(two))
        assert _disk.disk_sequence(fd) == _disk.disk_sequence(str(two))
    finally:
        _files.close(fd)


@pytest.mark.skipif(not LINUX, reason="reads mountinfo")
def test_network_file_systems_are_known_by_their_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type of the mount that the path lies on decides, the longest and last one."""
    assert not _disk.is_network_file_system(str(tmp_path / "not" / "there"))
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1 0 0:1 / / rw - ext4 /dev/x rw\n2 1 {number} / {tmp_path} rw shared:1 - nfs4 srv:/ rw\n"
    )
    real_open = open

    def fake_open(name: object, *args: object, **more: object) -> object:
        return real_open(mounts if name == "/proc/self/mountinfo" else name, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", fake_open)
    assert _disk.is_network_file_system(str(tmp_path / "queue"))


def test_the_clocks_run_forward_and_boot_id_stays() -> None:
    """Boot time and monotonic time advance together; the boot id is the same in each process."""
    boot, mono = _clock.boottime_us(), _clock.monotonic_ns()
    time.sleep(0.01)
    assert 9_000 < _clock.boottime_us() - boot < 5_000_000
    assert 9_000_000 < _clock.monotonic_ns() - mono < 5_000_000_000
    assert abs(_clock.wall_us() / 1e6 - time.time()) < 5
    code = "from weclaw_embedded import _clock; print(_clock.boot_id().hex())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=_environment(), capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == _clock.boot_id().hex()
    assert len(_clock.boot_id()) == 16


def test_errors_pickle_with_their_attributes() -> None:
    """Every error comes back from pickle with class, text and attributes."""
    for name in errors.__all__:
        cls = getattr(errors, name)
        if name == "CorruptError":
            error = cls(5, "bad checksum")
        elif name in ("OffsetTrimmedError", "DeadLetterError"):
            error = cls(5)
        else:
            error = cls("what happened")
        error.extra = "kept"
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__


def test_the_tree_is_drawn_as_it_is() -> None:
    """The drawing in the module names every class, each under its parents."""
    drawing = errors.__doc__ or ""
    for name in errors.__all__:
        assert name in drawing
    for name in ("DiskFullError", "StoreFailedError", "FencedError"):
        assert issubclass(getattr(errors, name), errors.StorageError)
        assert issubclass(getattr(errors, name), errors.SendFailedError)
    assert errors.__all__ == sorted(errors.__all__)


CHOICES = ["signal.SIG_IGN", "signal.SIG_DFL", "lambda *_: os._exit(1)"]


@pytest.mark.parametrize("choice", CHOICES, ids=["ignored", "default", "handled"])
def test_a_pipe_that_nobody_reads_is_an_error_and_no_signal(choice: str) -> None:
    """Whatever the program chose for SIGPIPE; and what it blocks is as before."""
    code = f"""
import os, signal
from weclaw_embedded import _files
signal.signal(signal.SIGPIPE, {choice})
source, pipe = os.pipe()
assert _files.write_pipe(pipe, b"abc") == 3
os.close(source)
for _ in range(3):
    try:
        _files.write_pipe(pipe, b"abc")
    except BrokenPipeError:
        print("an error")
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
assert not signal.sigpending()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "an error\n" * 3), done.stderr
