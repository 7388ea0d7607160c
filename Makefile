# Two commands on a fresh clone: `make demo` and `make test`. Both set everything up first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint format build clean help

help: ## Say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(STAMP) ## Publish three versions and update a live model through every commit mode
	$(BIN)/weightcast demo

test: $(STAMP) ## The whole test suite, in random order
	$(BIN)/pytest -m "not slow" --cov --cov-report= --cov-fail-under=93

test-slow: $(STAMP) ## The full form of the long matrices
	$(BIN)/pytest -m slow

lint: $(STAMP) ## ruff and mypy (strict on src)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Let ruff format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

build: $(STAMP) ## Build the wheel and the sdist into dist/
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build

clean: ## Remove the virtual environment and what builds leave behind
	rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .coverage*

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weightcast needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,test,lint]'
	@touch $@
