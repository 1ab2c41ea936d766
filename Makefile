# make setup · demo · test · test-fast · test-oldest · stress · models · bench · notebooks · check · clean
# Everything runs in .venv, which is made on first use and again when the dependencies change; test-oldest in .venv-oldest.
PYTHON ?= python3.11
# Some images set this; then every process compiles torch and transformers anew, for eight seconds.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
# Two workers with one thread each: more threads than cores make every one of them slower.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/pytest -n 2
OLD := .venv-oldest/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

DEMO_ARGS ?= --task niah_multikey_1 --length 1500 --items 6 --seed 0 --out out/demo
CHECK_ARGS ?=
BENCH_ARGS ?=
STRESS_ARGS ?=

.PHONY: setup demo lint test test-fast test-oldest stress models bench notebooks check clean

setup: .venv/.embedded

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

.venv/.embedded: .venv/.installed kvprobe/embedded.py kvprobe/conversion.py
	$(BIN)/python -m kvprobe.embedded
	touch $@

demo: setup
	$(BIN)/kvprobe niah $(DEMO_ARGS)

# Triton (Linux) is an extra of 1 GB; only its tests need it, and they need no GPU.
.venv/.triton: .venv/.installed
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,triton]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: lint .venv/.triton
	$(PYTEST)

# Without what takes more than ten seconds, and without the linters.
test-fast: setup .venv/.triton
	$(PYTEST) -m 'not slow'

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	$(OLD)/python $(PIP_INSTALL) -c constraints-oldest.txt -e '.[test]'
	touch $@

# The fast tests on the oldest versions that pyproject.toml allows. The kernels are left out: they import torch and
# Triton alone, and torch is the same in both sets.
test-oldest: setup .venv-oldest/.installed
	$(ONE_THREAD) $(OLD)/pytest -n 2 -m 'not slow' --ignore=tests/kernels

# A million random rows: no bound below what it bounds, nothing that is not finite, every correction undone.
stress: setup
	$(ONE_THREAD) $(BIN)/python tests/stress.py $(STRESS_ARGS)

# docs/models.md, the table of what was found out about every family.
models: setup
	$(ONE_THREAD) $(BIN)/python tests/conformance/table.py

bench: setup
	$(BIN)/python kernels/bench/run.py $(BENCH_ARGS)

notebooks: setup
	$(BIN)/python notebooks/build.py

check: setup
	$(BIN)/kvprobe check $(CHECK_ARGS)

clean:
	rm -rf .venv .venv-oldest out build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
