# Everything that a developer or CI runs. Each target works in a fresh clone with nothing activated: it makes .venv, installs what it
# needs there, and leaves a stamp so that the next call is quick. `make help` lists the targets.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# The first of these that runs and is new enough becomes the virtual environment's Python. Choose one: make test PYTHON=python3.12
PYTHON ?= python3 python3.13 python3.12 python3.11
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
TTFT_ARGS ?=

.PHONY: help demo test test-rdma test-integrations ttft pyverbs check format changelog bench clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/    make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

demo: $(VENV)/.installed-base ## set up, then run the demonstration
	$(BIN)/infinistore demo $(DEMO_ARGS)

# bin/pytest, not `python -m pytest`: that would put the top folder on sys.path.
test: $(VENV)/.installed-test ## set up, then run all the tests; PYTEST_ARGS adds arguments
	$(BIN)/pytest $(PYTEST_ARGS)

# What skips without RDMA in `make test` fails here.
test-rdma: $(VENV)/.installed-test ## set up, then run tests/rdma, in a virtual machine with Soft-RoCE if there is no RDMA here
	@tests/rdma/guest/test $(VENV) $(PYTEST_ARGS)

pyverbs: $(VENV)/.installed-base ## make the distribution's RDMA bindings importable in .venv, or say what is missing
	@tests/rdma/guest/pyverbs $(BIN)/python

# The engines that the integrations are tested with. Each has an environment of its own, .venvs/NAME, made of what
# requirements/NAME.txt lists and, without its dependencies, what requirements/NAME.no-deps.txt does. To add one: its name
# here, those files, and its tests in tests/integrations/NAME.
ENGINES := lmcache vllm aibrix sglang
ENGINE_STAMPS := $(ENGINES:%=.venvs/%/.installed)

test-integrations: $(ENGINE_STAMPS) ## set up the engines' environments, then test the integrations in them
	@failed=; \
	for engine in $(ENGINES); do \
	    echo "== tests/integrations/$$engine, in .venvs/$$engine"; \
	    .venvs/$$engine/bin/pytest tests/integrations/$$engine $(PYTEST_ARGS) || failed="$$failed $$engine"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

ttft: .venvs/vllm/.installed ## time to first token, cold and warm, in vLLM and transformers; TTFT_ARGS adds arguments
	.venvs/vllm/bin/python bench/ttft.py $(TTFT_ARGS)

check: $(VENV)/.installed-dev ## lint, formatting, types, changelog entries
	@failed=; \
	for step in "ruff check" "ruff format --check" "mypy"; do echo "$$step"; $(BIN)/$$step || failed=1; done; \
	echo "towncrier build --draft"; $(BIN)/towncrier build --draft --version next >/dev/null || failed=1; \
	[ -z "$$failed" ]

format: $(VENV)/.installed-dev ## put formatting and imports in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

changelog: $(VENV)/.installed-dev ## show the changes that are not released yet
	$(BIN)/towncrier build --draft --version next

# A benchmark is a file in bench/ that can be run; the others there are what benchmarks share. ttft.py has an environment
# and a target of its own, for itself and what it runs.
bench: $(VENV)/.installed-test ## run the benchmarks; BENCH_ARGS adds arguments
	@set -e; programs=$$(grep -l '__name__ == "__main__"' bench/*.py | grep -v -E '/(ttft|small_llama|[a-z]+_engine)\.py'); \
	for program in $$programs; do echo "== $$program"; $(BIN)/python "$$program" $(BENCH_ARGS); done

clean: ## remove the virtual environments, caches and build results
	rm -rf $(VENV) .venvs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is older than pyproject.toml when the requirements may have changed.
$(VENV)/.installed-base: EXTRAS :=
$(VENV)/.installed-test: EXTRAS := [test]
$(VENV)/.installed-dev: EXTRAS := [dev]
$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".$(EXTRAS)"
	@touch $@

# Not compiled to bytecode: that is done for what is imported, which is a small part of what an engine brings.
$(ENGINE_STAMPS): .venvs/%/.installed: requirements/%.txt $(wildcard requirements/*.no-deps.txt) pyproject.toml \
                                      | .venvs/%/bin/python
	@set -e; install() { .venvs/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$$@"; }; \
	install --requirement requirements/$*.txt --editable .; \
	if [ -f requirements/$*.no-deps.txt ]; then install --no-deps --requirement requirements/$*.no-deps.txt; fi
	@touch $@

# Made by one pattern for another, it would count as intermediate, and make would delete it at the end.
.PRECIOUS: %/bin/python
%/bin/python:
	@set -e; chosen=; \
	for python in $(PYTHON); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then chosen=$$python; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
	    echo "InfiniStore needs Python 3.11 or newer, and none of these is: $(PYTHON)" >&2; \
	    echo "On Debian 12: apt-get install python3 python3-venv   (or: make $(MAKECMDGOALS) PYTHON=/path/to/python)" >&2; \
	    exit 1; \
	fi; \
	if "$$chosen" -c 'import ensurepip' 2>/dev/null; then "$$chosen" -m venv $*; \
	elif command -v uv >/dev/null; then uv venv --quiet --seed --python "$$chosen" $*; \
	elif command -v virtualenv >/dev/null; then virtualenv --quiet --python "$$chosen" $*; \
	else \
	    echo "$$chosen cannot make a virtual environment. Install what it lacks, then run this again:" >&2; \
	    echo "    apt-get install python3-venv" >&2; \
	    exit 1; \
	fi
