# Two commands from a fresh clone: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# what torch's build with CUDA brings along; elsewhere its interpreter tests the kernels
TRITON ?= $(if $(filter Linux,$(shell uname -s)),triton==3.7.1)
OLDEST_TRANSFORMERS ?= transformers==5.5.0
# only beside the oldest transformers: so that quantised weights are tested, and their absence as well
TORCHAO ?= torchao==0.18.0
KVPRESS ?= kvpress==0.5.5
LLAMA_CPP ?= llama-cpp-python==0.3.36
# a process per core; each begins with its half of the files and then takes work from the other
SPREAD ?= --numprocesses auto --maxprocesses 4 --dist worksteal
BIN := .venv/bin
OLD := .venv-oldest/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest check fix bench peers docs models clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch first and alone: a range would be resolved to a build with CUDA
.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet $(TRITON) --editable ".[dev]"
	@touch $@

.venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	$(OLD)/pip install --quiet "$(TORCH)"
	$(OLD)/pip install --quiet "$(OLDEST_TRANSFORMERS)" $(TRITON) "$(TORCHAO)" --editable ".[dev]"
	@touch $@

demo: .venv/.installed  ## the main job on the embedded model: a story in 128 tokens, a question under every policy
	@$(BIN)/kvkeep demo

docs: .venv/.installed  ## write the generated pages
	$(BIN)/python tools/policies_page.py
	$(BIN)/python tools/models_page.py

models: .venv/.installed .venv-oldest/.installed  ## try every decoder of the newest and the oldest transformers (10 minutes)
	$(BIN)/python tools/models_page.py --try
	$(OLD)/python tools/models_page.py --try

test: .venv/.installed  ## the tests, with the newest transformers (under 5 minutes on 2 cores, no network)
	$(BIN)/python -m pytest $(SPREAD)

test-all: .venv/.installed  ## what `make test` leaves out: most cases of long lists, 1 000 schedules of faults, peak memory
	$(BIN)/python -m pytest $(SPREAD) -m slow

test-oldest: .venv-oldest/.installed  ## what touches transformers, with the oldest version that is supported
	$(OLD)/python -m pytest $(SPREAD) tests/docs/test_models_page.py \
		$(addprefix tests/,parity models rotary planning engine evals cli research/analysis)

check: .venv/.installed  ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

fix: .venv/.installed  ## format and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.installed  ## every benchmark for CPUs in its short form, one after the other (docs/benchmarks.md)
	@set -e; for file in $(filter-out bench/gpu.py,$(wildcard bench/*.py)) "bench/latency.py --history"; do echo "== $$file"; $(BIN)/python $$file; done

peers: .venv-peer-kvpress/.installed .venv-peer-llama_cpp/.installed  ## environments for the peers of the benchmarks

.venv-peer-kvpress/.installed:
	$(PYTHON) -m venv .venv-peer-kvpress
	.venv-peer-kvpress/bin/pip install --quiet "$(TORCH)"
	.venv-peer-kvpress/bin/pip install --quiet "$(KVPRESS)"
	@touch $@

# compiled on this machine: needs a C++ compiler, takes minutes
.venv-peer-llama_cpp/.installed:
	$(PYTHON) -m venv .venv-peer-llama_cpp
	.venv-peer-llama_cpp/bin/pip install --quiet "$(TORCH)"
	.venv-peer-llama_cpp/bin/pip install --quiet gguf safetensors "$(LLAMA_CPP)"
	@touch $@

clean:  ## remove the environments and caches
	rm -rf .venv .venv-oldest .venv-peer-* .pytest_cache .mypy_cache .ruff_cache .hypothesis
