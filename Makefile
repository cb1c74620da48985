# Everything a person or a machine does with this repository, one word each.
# `make test` and `make demo` need nothing before them: they build .venv first.
.DEFAULT_GOAL := help
.PHONY: help setup setup-bench demo test test-quick check format docs bench bench-compare sim sim-long torture spark-property clean
SHELL := /bin/bash

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
BENCH_STAMP := $(VENV)/.setup-bench-stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check
SEED ?= 1
SIM_LONG_RUNS ?= 3000
SPARK_PROPERTY ?= 304
TORTURE_MESSAGES ?= 50000
# Which benchmark to run, and its options: make bench BENCH="publish-sync --json"
BENCH ?=

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
		awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP)  ## build .venv with everything for development
	@:

# Only packaging changes make this run again: a second `make setup` does nothing.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "onward needs Python 3.11 or newer as '$(PYTHON)'; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv; \
		  else echo "missing: python3-venv. As root: apt-get install python3-venv" >&2; exit 1; fi; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1/2 installing onward and its tools into $(VENV) (about 400 MB to download, Spark included) ..."
	@$(PIP) install --progress-bar off --editable '.[dev,compression]' | \
		grep --line-buffered -E '^ *(Downloading|Using cached|Building|Installing|Successfully)' | \
		sed -u -E 's/^ +//; s/^(Installing collected packages).*/\1 .../; s/^Successfully.*/done/'; \
		exit $${PIPESTATUS[0]}
	@echo "2/2 installing the fuzzer, if there is one for this Python ..."
	@# The fuzzer is a luxury: it has no wheels for every Python, and nothing else needs it.
	@$(PIP) install --quiet --only-binary :all: --editable '.[fuzz]' >/dev/null 2>&1 || \
		echo "note: atheris is not available here; the fuzz targets will not run"
	@touch $@

setup-bench: $(BENCH_STAMP)  ## install the brokers and clients that `make bench` compares with

$(BENCH_STAMP): $(STAMP)
	@for server in redis-server nats-server beanstalkd postgresql; do \
		command -v $$server >/dev/null && continue; \
		test $$server = postgresql && ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 && continue; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$server || \
				{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$server; } || \
				echo "note: $$server cannot be installed; its comparison will be left out" >&2; \
		else echo "note: $$server is missing. As root: apt-get install $$server" >&2; fi; done
	@$(PIP) install --quiet --editable '.[bench]'
	@touch $@

demo: setup  ## see Onward at work, on one screen
	@$(BIN)/onward demo

# Unbuffered, so that dots appear at once in a pipe, too. tests/conftest.py divides the tests.
PYTEST_TWO := PYTHONUNBUFFERED=1 $(BIN)/pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

test: setup  ## run all tests
	@$(PYTEST_TWO)

test-quick: setup  ## run the fast tests for daily work, in at most two minutes
	@$(PYTEST_TWO) -m "not slow and not spark and not e2e and not sim" tests/tidy tests/unit tests/spec

check: setup  ## lint, format, types, and the tests that lint the repository
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q tests/tidy

format: setup  ## format the code and sort its imports
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: setup  ## write the pages of the reference that are generated from the code
	@$(BIN)/python tests/docs/operations_page.py

bench: setup-bench  ## measure Onward and its neighbours on this machine
	@$(BIN)/onward bench $(BENCH)

bench-compare: setup  ## compare with another commit: make bench-compare BASE=COMMIT BENCH="consume-ack --seconds 2"
	@test -n "$(BASE)" || { echo "name the commit to compare with: BASE=COMMIT" >&2; exit 1; }
	@$(BIN)/python benchmarks/compare.py $(if $(ROUNDS),--rounds $(ROUNDS)) $(BASE) $(BENCH)

sim: setup  ## run the simulation from one seed: make sim SEED=7
	@ONWARD_SIM_SEED=$(SEED) $(BIN)/pytest -q -s tests/sim/test_seeds.py

sim-long: setup  ## run the simulation from many seeds, from SEED on; stops at the first that fails
	@ONWARD_SIM_SEED=$(SEED)-$$(($(SEED) + $(SIM_LONG_RUNS) - 1)) $(BIN)/pytest -q -x tests/sim/test_seeds.py

torture: setup  ## 200,000 deliveries while consumers and the broker are killed: make torture SEED=7
	@ONWARD_TORTURE_SEED=$(SEED) ONWARD_TORTURE_MESSAGES=$(TORTURE_MESSAGES) \
		$(BIN)/pytest -q tests/e2e/test_torture_groups.py

spark-property: setup  ## random queries on Spark against plain rows: make spark-property SEED=7 SPARK_PROPERTY=1000
	@SEED=$(SEED) SPARK_PROPERTY=$(SPARK_PROPERTY) $(BIN)/pytest -q -x tests/spark/test_property.py

clean:  ## remove what was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
