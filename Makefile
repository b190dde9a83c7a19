# Every target builds .venv by itself when it is missing or older than its inputs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2

.PHONY: setup test test-slow test-gpu lint format docs bench clean

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

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
