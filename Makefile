# Every target sets up what it needs in .venv; a second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests start many processes, each of which would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)

.PHONY: demo serve ray test test-all test-isa coverage siege check docs support papers bench peers gpu-check gpu-wheels build dist images clean help

help:
	@echo "make demo    three pictures and a text question through the shipped model"
	@echo "make serve   the OpenAI-compatible server on the shipped model, http://127.0.0.1:8000"
	@echo "make ray     Ray beside the project's packages, in .ray-venv: for serve --cluster ray on several machines"
	@echo "make test    the test suite, four minutes on two cores; ISA=avx2 as on a processor without AVX-512"
	@echo "make test-all  the campaigns behind it: slow tests, every example of properties, processes that start in full"
	@echo "make test-isa  the kernels of every instruction set, emulated where the processor lacks them"
	@echo "make coverage  the quick tests with line and branch coverage, in build/coverage; ARGS=tests/scheduler chooses"
	@echo "make siege   attacks on the server, five minutes on two cores, and that it fails without one of its guards"
	@echo "make check   format, lint, types, architecture"
	@echo "make docs    the API reference, in build/docs"
	@echo "make support the tables of model families and of transformers' types in docs/, from the parity tests"
	@echo "make papers  the papers' experiments in full and their page, 40 minutes; what the same sources simulated stays"
	@echo "make bench   the quick benchmarks of this machine, in build/bench or DIR=..."
	@echo "make peers   llama.cpp, OpenVINO GenAI and vLLM's CPU build for bench.compare, in build/peers: half an hour, 6 GB"
	@echo "make gpu-check  on a machine with a GPU: builds, tests and measures, in build/gpu-check or DIR=..."
	@echo "make gpu-wheels  the packages that such a machine may lack, in .whl, and FlashInfer with kernels compiled ahead"
	@echo "make build   the environment and the native extension only"
	@echo "make dist    an sdist and a wheel for each Python here, for the CPU, in dist/; PYTHONS=... names them"
	@echo "make images  the image hydra-engine; IMAGES=\"cpu cuda\" also the one for a GPU, hydra-engine:cuda"

build: $(VENV)/.dev

# What runs the engine, and what also tests it. Without a GPU's driver the first compiles for the processor alone.
BOOTSTRAP := bootstrap.py constraints.txt setup.py pyproject.toml $(NATIVE_SOURCES)
FIND_PYTHON = command -v $(PYTHON) >/dev/null && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "Python 3.11 or newer is needed: install it or set PYTHON=..."; exit 1; }

$(VENV)/.run: $(BOOTSTRAP)
	@$(FIND_PYTHON)
	@$(PYTHON) bootstrap.py
	@touch $@

$(VENV)/.dev: $(BOOTSTRAP)
	@$(FIND_PYTHON)
	@$(PYTHON) bootstrap.py --dev
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run
	@$(BIN)/python -m hydra_engine demo

serve: $(VENV)/.run
	@$(BIN)/python -m hydra_engine serve demo $(ARGS)

# An environment of its own on top of .venv, .ray-venv: nothing else needs Ray.
ray: $(VENV)/.run
	@$(BIN)/python -m tools.ray_environment

# `make test ISA=avx2`: as on a processor that has no more instructions (scalar, avx2, avx512, avx512bf16, amx).
ISA_TORCH = $(if $(filter scalar,$(ISA)),default,$(if $(filter avx2,$(ISA)),avx2,avx512))
ISA_ONEDNN = $(if $(filter scalar,$(ISA)),SSE41,$(if $(filter avx2,$(ISA)),AVX2,ALL))
ifdef ISA
export HYDRA_MAX_CPU_ISA := $(ISA)
export ATEN_CPU_CAPABILITY := $(ISA_TORCH)
export ONEDNN_MAX_CPU_ISA := $(ISA_ONEDNN)
endif

# In another order every time; the head says its seed, which --randomly-seed=N takes. The architecture is looked at by `make check`.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal -p randomly

test: build
	@$(PYTEST) -m "not slow" $(or $(ARGS),--ignore=tests/architecture)

# What `make test` leaves out, and properties with all their examples; then engines and commands whose processes start in full,
# where other tests fork them from one that has torch loaded. ARGS=--drawn as in CI: of the tests marked so, a third of the cases.
STARTS := tests/cli tests/engine/test_topologies.py tests/server/test_served.py
test-all: build
	@$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=thorough $(ARGS)
	@TESTS_EXEC=1 $(PYTEST) -m "not slow" $(STARTS)
	@$(MAKE) --no-print-directory test-isa
	@$(MAKE) --no-print-directory siege ARGS=

# Slower than `make test`. Instances and servers in processes of their own count too.
coverage: build
	@mkdir -p build/coverage
	@$(PYTEST) -m "not slow" --cov --cov-report=html --cov-report=term $(ARGS)

# The kernels of all instruction sets, with what is above AVX2 emulated (setup.py). ARGS="-k 'test_linear and amx'" chooses.
ISA_TESTS := tests/ops tests/preprocess/test_resize.py -m "not slow" -k "avx512 or amx or behind_the_source"
test-isa: build
	@$(BIN)/python setup.py -q build_emulated
	@PYTHONPATH=$(CURDIR)/tests/native/emulated $(PYTEST) $(ISA_TESTS) $(ARGS)

# What clients, neighbours, hosts of pictures and model folders can do to a server. ARGS="--case GROUP" chooses.
siege: build
	@$(BIN)/python -m bench.siege $(ARGS)
	@$(BIN)/python -m bench.siege --control drawn

check: build
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

# Public API, operators and errors, from signatures and docstrings.
docs: build
	@$(BIN)/python -m tools.api_reference build/docs

# The tables of docs/models.md and docs/transformers-models.md, from the results of the tests that gate them.
SUPPORT_TESTS := tests/models tests/server/test_families.py tests/engine/test_generic.py tests/engine/test_transformers_models.py
support: build
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -o junit_family=xunit1 --junitxml=build/support.xml $(SUPPORT_TESTS)
	@$(BIN)/python -m tests.support_table build/support.xml
	@$(BIN)/python -m tests.transformers_models build/support.xml

# docs/papers.md and bench/results/papers. ARGS=NAME chooses; one that was ended goes on where it was.
papers: build
	@$(BIN)/python -m hydra_engine reproduce $(or $(ARGS),all) --full --page docs/papers.md

# The quick set of the micro-benchmarks: a document of each, summary.md and summary.png. DIR=... puts them elsewhere.
bench: build
	@$(BIN)/python -m bench.micro $(if $(DIR),--dir "$(DIR)") $(ARGS)

# What bench.compare measures beside the engine, each in a place of its own. What is there already stays.
peers:
	@PYTHON=$(PYTHON) sh bench/peers/install.sh

# For a machine with a GPU: from the source tree as it is, with whatever $(PYTHON) has. No network, no environment.
# `exec`, so that what ends it is told to the check itself and it keeps what it has.
gpu-check:
	@exec $(PYTHON) -m bench.gpu_check $(if $(DIR),--dir "$(DIR)") $(ARGS)

# Where there is a network: what that machine lacks, into .whl, to be carried along, and FlashInfer with kernels that are compiled
# here. ARGS="--python 3.12 --kernels decode-128,fa2-128 NAME==VERSION".
gpu-wheels: build
	@$(BIN)/python -m bench.gpu_check.wheels $(ARGS)

# What an index takes: an sdist and a wheel for each Python that is found, or of PYTHONS="python3.11 /path/to/python3.12".
# The same bytes every time; needs $(PYTHON), a C++ compiler and an index of packages, and no .venv.
dist:
	@$(FIND_PYTHON)
	@$(PYTHON) -m tools.dist $(PYTHONS)

# With podman, buildah or docker, and a network. IMAGES="cpu cuda" chooses.
IMAGES ?= cpu
images:
	@sh deploy/build-images.sh $(IMAGES)

clean:
	rm -rf $(VENV) .ray-venv build dist hydra_engine/*.so
