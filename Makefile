# The commands of this repository. Each makes what it needs: a virtual environment in .venv and the native libraries.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
ifeq ($(origin CC),default)
CC := gcc
endif
VENV := .venv
BIN := $(VENV)/bin
PIP_FLAGS ?= --quiet --disable-pip-version-check --retries 1
NO_PACKAGES = { echo "pip could not install the packages; its words are above. Where no registry is reached: PIP_INDEX_URL names a mirror," \
  "PIP_NO_INDEX=1 PIP_FIND_LINKS=folder a folder of wheels; then make again" >&2; exit 1; }
PYTEST_FLAGS ?=
BENCH_FLAGS ?=
MODEL_FLAGS ?=
WHEELS ?= build/gpu-wheels
WHEELS_PYTHON ?= 3.12
# Test processes of `make test` and `make coverage`, each with whole files; 0 runs all tests in one that a debugger may stop.
# Two for each core: more than half of a test's time is waited.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder
KUBELAB ?= $(firstword $(wildcard ../shared/kube/kubelab))
export CC
# Where it is set, each of the thousand processes that the tests start would compile the same modules again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test coverage model lint fmt bench bench-gpu test-gpu gpu-clients gpu-wheels test-kube sanitize native arm64 clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## *(.*)/  make \1\t\2/' | expand -t 20

demo: $(VENV)/.demo native  ## two simulated cards, the daemon, the extender, pods that share them, a live table
	$(BIN)/python -m localcluster demo

test: $(VENV)/.dev native  ## every test that this machine can run
	@$(BIN)/python -m pytest --cache-clear $(PARALLEL) $(PYTEST_FLAGS) || $(BIN)/python -m tests.support.alone $$?

coverage: $(VENV)/.dev native  ## branch coverage of Python, line coverage of C (half an hour); for `python -m benchmarks product`
	$(BIN)/python -m benchmarks._coverage --jobs $(JOBS)

model: $(VENV)/.dev native  ## random steps natively and in shares, 20,000 of 50 seeds (about ten minutes; MODEL_FLAGS='--seeds 1-5 --shrink')
	$(BIN)/python -m tests.model.model_run $(MODEL_FLAGS)

lint: $(VENV)/.dev  ## ruff, mypy --strict, who imports and who includes whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m vcuda._build.arrows

fmt: $(VENV)/.dev  ## format the Python code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev native  ## the benchmarks, one after the other (about an hour; BENCH_FLAGS=--quick: less); rewrites docs/benchmarks.md
	$(BIN)/python -m benchmarks $(BENCH_FLAGS) --report docs/benchmarks.md

bench-gpu: $(VENV)/.gpu native  ## those of the benchmarks that measure a real card; rewrites their part of docs/benchmarks.md
	$(BIN)/python -m benchmarks --card $(BENCH_FLAGS) --report docs/benchmarks.md

test-gpu: $(VENV)/.gpu native  ## unmodified clients in shares of a real NVIDIA card; what a simulated one can do without
	$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/gpu

gpu-clients: $(VENV)/.tools  ## PyTorch, CuPy, JAX, Triton, numba-cuda and nvcc for test-gpu and bench, in .venv/gpu-clients (7 GB)
	[ -x $(VENV)/gpu-clients/bin/python ] || $(PYTHON) -m venv $(VENV)/gpu-clients
	$(VENV)/gpu-clients/bin/python -m pip install $(PIP_FLAGS) numpy torch cupy-cuda13x 'jax[cuda13]' numba-cuda \
	  'cuda-bindings>=13' nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm

# For a card's machine that reaches no registry: copy the folder there, then PIP_NO_INDEX=1 PIP_FIND_LINKS=folder make test-gpu.
gpu-wheels: $(VENV)/.tools  ## what test-gpu and bench-gpu need from a registry, as wheels for another machine: WHEELS=folder WHEELS_PYTHON=3.12
	$(BIN)/python -m pip download $(PIP_FLAGS) --dest $(WHEELS) --only-binary=:all: --python-version $(WHEELS_PYTHON) \
	  --requirement tests/gpu/requirements.txt

test-kube: $(VENV)/.dev native  ## the tests on a real one-node Kubernetes (../shared/kube/kubelab or KUBELAB=path)
	@if ! compgen -G 'tests/kube/test_*.py' >/dev/null; then echo "test-kube: tests/kube holds no test yet"; \
	elif [ ! -x "$(KUBELAB)" ]; then echo "test-kube: skipped, no kubelab at ../shared/kube/kubelab; set KUBELAB=path"; \
	else export KUBELAB="$(KUBELAB)"; $(BIN)/python -m pytest --cache-clear $(PYTEST_FLAGS) -m kube tests/kube || \
	  $(BIN)/python -m tests.support.alone $$? -m kube; fi

sanitize: $(VENV)/.dev  ## the native code's own tests under ASan, UBSan and TSan
	@if [ -f tests/native/run.py ]; then $(BIN)/python tests/native/run.py --sanitizers; \
	else echo "sanitize: tests/native holds no runner yet"; fi

# Python and its packages are the machine's own; what is loaded into tenants and simulates the driver is for the other one.
ARM64 := CC=aarch64-linux-gnu-gcc NM=aarch64-linux-gnu-nm EMULATOR='qemu-aarch64 -L /usr/aarch64-linux-gnu'
arm64: $(VENV)/.dev  ## shims and simulator for arm64 in build/arm64, and the native tests that emulation can show (five minutes)
	@if ! command -v aarch64-linux-gnu-gcc qemu-aarch64 >/dev/null; then echo "arm64: skipped, no cross compiler or emulator; on Debian:" \
	  "apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"; \
	else $(ARM64) $(BIN)/python -m vcuda._build --into build/arm64 && $(ARM64) $(BIN)/python tests/native/run.py && \
	  VCUDA_TEST_ARM64=1 $(BIN)/python -m pytest tests/packaging/test_packaging_arm64.py; fi

# A few packages beside Python and gcc; all that is tested and measured there runs from this folder.
$(VENV)/.gpu: tests/gpu/requirements.txt | $(VENV)/.tools
	[ -e $(VENV)/.dev ] || $(BIN)/python -m pip install $(PIP_FLAGS) --requirement tests/gpu/requirements.txt
	@touch $@

# Rebuilds only what changed; an editable install keeps using the files in this checkout.
native: | $(VENV)/.tools
	@$(BIN)/python -m vcuda._build

clean:  ## removes what the other commands made in this checkout: .venv, build, native libraries, caches
	rm -rf $(VENV) build dist *.egg-info vcuda/lib vcuda/_native.abi3.so .hypothesis .*_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.tools:
	@[ -w . ] || { echo "$(CURDIR) can't be written, and all that is made goes there: copy the checkout to where you may write" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "This needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true). Install it, or run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@command -v $(firstword $(CC)) >/dev/null || { echo "This needs a C compiler and found no '$(firstword $(CC))'. On Debian: apt-get install gcc libc6-dev" >&2; exit 1; }
	@echo 'int main(void){return 0;}' | $(CC) -x c -include stdio.h - -o /dev/null || \
	  { echo "'$(CC)' can't compile a program: are the C library's headers there? On Debian: apt-get install libc6-dev" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || \
	  { echo "This needs Python's C headers. On Debian: apt-get install python3-dev" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed. On Debian: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.demo: pyproject.toml setup.py | $(VENV)/.tools
	@echo "fetching 45 MB of packages and compiling the native libraries: a minute or two, this time only"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[demo]' || $(NO_PACKAGES)
	@touch $@

$(VENV)/.dev: pyproject.toml setup.py | $(VENV)/.tools
	@echo "fetching the packages of the tests and tools and compiling the native libraries: some minutes, this time only"
	@$(BIN)/python -m pip install $(PIP_FLAGS) -e '.[dev]' || $(NO_PACKAGES)
	@touch $@ $(VENV)/.demo
