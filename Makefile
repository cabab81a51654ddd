# Two commands for a newcomer: `make sweep` and `make test`. Both install once, into .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKLOAD ?= workloads/mixed.yaml
ARGS ?=

.PHONY: help sweep test bench install lint clean

help:
	@echo "make sweep          install if needed, run $(WORKLOAD), print the table and the path of the report"
	@echo "make test           install if needed, run linters and tests"
	@echo "make bench          kernel benchmarks and the engine against Hugging Face in one sitting"
	@echo "make clean          remove .venv and caches (results/ stays)"
	@echo "make sweep WORKLOAD=workloads/sonnet.yaml ARGS='--repeats 1'"

# The stamp is newer than what it was made from exactly when nothing has to be installed.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvbench needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvbench and its pinned dependencies into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

install: $(VENV)/.installed

sweep: install
	@$(BIN)/kvbench sweep $(WORKLOAD) $(ARGS)

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports

test: lint
	@$(BIN)/python -m pytest $(ARGS)

bench: install
	@$(BIN)/python -m pytest tests/benchmarks $(ARGS)
	@$(BIN)/kvbench bench-engine

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .benchmarks build *.egg-info
