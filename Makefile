# Two commands for a newcomer: `make sweep` and `make test`. Both install once, into .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKLOAD ?= workloads/mixed.yaml
ARGS ?=

QUICK ?=
VLLM_PYTHON ?=
BASE ?=

.PHONY: help sweep test test-all test-touched bench bench-peers install install-test lint clean

help:
	@echo "make sweep          install if needed, run $(WORKLOAD), print the table and the path of the report"
	@echo "make test           install if needed, run linters and the tests of the main ring: 7 minutes on 2 cores"
	@echo "make test-all       all tests: also the Triton interpreter in full, Ray, fuzzers, soak, every model family"
	@echo "make test-touched   of those beyond the main ring, what a change touches: BASE=COMMIT, else the last day's"
	@echo "make bench          kernels, engine, bookkeeping and peers: 10 minutes on 2 cores; a table into results/bench/"
	@echo "make bench QUICK=1  the corners of it, 4 minutes"
	@echo "make bench-peers    the engine beside Hugging Face and, with VLLM_PYTHON=/path/to/its/python, vLLM; the ratios,"
	@echo "                    and exit code 1 below 5x HF continuous batching or 1.5x vLLM in float32, 1.3x in"
	@echo "                    bfloat16; 10 to 18 minutes"
	@echo "make clean          remove .venv and caches (results/ stays)"
	@echo "make sweep WORKLOAD=workloads/sonnet.yaml ARGS='--repeats 1'"

# A stamp is newer than what it was made from exactly when nothing has to be installed. Measuring needs no test tools.
PIP = set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt
SHOW = grep --line-buffered -oE '^ *(Downloading|Using cached|Installing|Successfully).{0,90}|^ *(ERROR|error|WARNING).*'

$(VENV)/.installed: pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvbench needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvbench and its pinned dependencies into $(VENV), once: 2 to 5 minutes, 2.4 GB on disk with torch for"
	@echo "CPUs, 5.9 GB with PyPI's torch for CUDA ..."
	@$(PIP) -e '.[engine]' 2>&1 | $(SHOW)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test tools into $(VENV), once: 1 minute, 0.6 GB ..."
	@$(PIP) -e '.[test]' 2>&1 | $(SHOW)
	@touch $@

install: $(VENV)/.installed

install-test: $(VENV)/.installed-test

sweep: install
	@$(BIN)/kvbench sweep $(WORKLOAD) $(ARGS)

lint: install-test
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(BIN)/python -m ci.plain_words

PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: lint
	@$(PYTEST) -m 'not full' $(ARGS)

test-all: lint
	@$(PYTEST) $(ARGS)

test-touched: install-test
	@files=$$($(BIN)/python -m ci.touched $(BASE)) && if [ -n "$$files" ]; then $(PYTEST) -m full $(ARGS) $$files; \
	else echo "the change touches no test beyond the main ring"; fi

bench: install-test
	@$(if $(QUICK),KVBENCH_BENCH=quick )$(BIN)/python -m tests.benchmarks.bench_run $(ARGS)

bench-peers: install-test
	@$(BIN)/kvbench dev bench-engine --require hf-continuous=5 \
	  $(if $(VLLM_PYTHON),--vllm-python '$(VLLM_PYTHON)' --require vllm=1.5 --require vllm-eager=1.5) $(ARGS); \
	float32=$$?; $(BIN)/kvbench dev bench-engine --dtype bfloat16 \
	  $(if $(VLLM_PYTHON),--vllm-python '$(VLLM_PYTHON)' --require vllm=1.3 --require vllm-eager=1.3) $(ARGS) \
	  && exit $$float32

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .benchmarks build *.egg-info
