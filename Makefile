# Everything here works on a fresh machine that has only Python 3.10 or newer and make:
# the first target called makes the virtual environment and installs what is needed into it.
#
#   make demo    the crash drills: what a kill -9 loses, and what it does not
#   make test    the tests, two at a time, but for those that take minutes
#   make long    these too
#   make crash   crash rounds: kill, reopen, compare with what was promised (ROUNDS=200 SEED=7)
#   make bench   speed beside the bare disk and other queues (BENCH_ARGS='--quick'); takes minutes
#   make check   formatting, lint and types
#   make clean   remove what these made
#
# Another interpreter: make test PYTHON=python3.12. Some tests: make test TEST_ARGS='-k dlq -x'.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The stamp carries the interpreter's name, so that another PYTHON sets up anew.
STAMP  := $(VENV)/.ready-$(notdir $(PYTHON))

DEMO_ARGS ?=
TEST_ARGS ?=
JOBS      ?= 2
ROUNDS    ?= 20
KIND      ?= random
SEED      ?=

BENCH_ARGS ?=

.PHONY: demo test long crash bench check format setup clean
.DEFAULT_GOAL := test

demo: $(STAMP)
	@$(BIN)/weclawctl demo $(DEMO_ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) -m 'not slow' $(TEST_ARGS)

long: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) $(TEST_ARGS)

crash: $(STAMP)
	@$(BIN)/python -m tests.crash --kind $(KIND) --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED))

bench: $(STAMP)
	@$(BIN)/python benchmarks/floor.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/bench_queue.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/bench_aio.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/bench_aio.py --slow-sync 5ms $(BENCH_ARGS)
	@$(BIN)/python benchmarks/bench_replica.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/versus.py $(BENCH_ARGS)
	@$(BIN)/python benchmarks/versus.py --slow-sync 5ms $(BENCH_ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(STAMP)

# A half-made environment has no stamp, so the next call starts it anew.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; name one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (once) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cli,metrics,examples,dev]'
	@touch $@

clean:
	rm -rf $(VENV) benchmarks/peers-venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
