PYTHON ?= $(shell command -v python3.11 || command -v python3)
PORT ?= 8000
CHECKPOINT ?= checkpoints/diffusiongemma-tiny

BIN := .venv/bin
READY := .venv/.ready
# Modules are compiled when first imported: compiling all of them would double the time of set-up.
# So Python must be free to keep what it compiled, or every start compiles all of vLLM again.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --disable-pip-version-check
# V=1 shows all that pip and vLLM say; else vLLM's warnings are shown, and what this project says.
QUIET := $(if $(V),,-qq)
# Where torch 2.13.0+cpu is, for machines whose first index lacks it.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.DEFAULT_GOAL := help
.PHONY: help setup serve demo test test-all test-whole test-thorough test-faults gpu-dry-run gpu-dry-run-cuda test-ray test-numerics test-vllm lint docs wheel bench codegen lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

setup: $(READY) ## make .venv with everything pinned in requirements/cpu.txt

$(READY): requirements/cpu.txt pyproject.toml
	@echo "[1/4] Python: $(PYTHON)"
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "Python 3.11, 3.12 or 3.13 is needed; name one with: make setup PYTHON=/path/to/python"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' || { \
	  echo "This Python cannot make virtual environments; on Debian: apt-get install python3-venv"; exit 1; }
	@"$(PYTHON)" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' || { \
	  echo "vLLM's CPU kernels load libnuma.so.1; on Debian: apt-get install libnuma1"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	@echo "[2/4] pinned packages: 1 GB to download, 4 GB installed, a minute or more (V=1 shows each)"
	@$(PIP_INSTALL) -qq pip==26.3 # shows progress while it installs, too
	@$(PIP_INSTALL) $(QUIET) --no-deps -r requirements/cpu.txt || { \
	  echo "Trying again with the PyTorch CPU index."; \
	  $(PIP_INSTALL) $(QUIET) --no-deps --extra-index-url $(TORCH_CPU_INDEX) -r requirements/cpu.txt; }
	@echo "[3/4] this project"
	@$(PIP_INSTALL) -qq --no-deps --no-build-isolation --editable .
	@echo "[4/4] first start of vLLM: half a minute, in which Python compiles it"
	@$(BIN)/vllm --version
	@touch $@
	@echo "Ready. Next: make serve, make demo or make test."

# Before set-up, which takes minutes. A name whose owner is no folder may be one on the hub.
ifeq ($(filter serve,$(MAKECMDGOALS))$(wildcard $(CHECKPOINT)),serve$(if $(wildcard $(dir $(CHECKPOINT))),,?))
$(error There is no folder '$(CHECKPOINT)'. CHECKPOINT=FOLDER names one, such as checkpoints/diffusiongemma-tiny)
endif

# With what lets clients watch canvases, and the page /canvas (docs/canvases.md).
serve: export VLLM_PLUGINS := vllm_dllm_canvas
ifndef V
serve: export VLLM_LOGGING_CONFIG_PATH := $(CURDIR)/scripts/quiet_log.json
serve: export PYTHONWARNINGS ?= ignore::FutureWarning
endif
serve: setup ## serve the shipped checkpoint on port 8000 (PORT=..., V=1 shows the whole log)
	$(BIN)/vllm serve $(CHECKPOINT) --host 127.0.0.1 --port $(PORT) \
	  --diffusion-config '{"canvas_length": 64}' --dtype float32 --max-model-len 1024 \
	  --kv-cache-memory-bytes 1G

demo: setup ## start a server, ask a few questions, show the canvas denoising (MODEL=FOLDER)
	$(BIN)/vllm-dllm demo $(MODEL)

# Three files at a time, for two cores: an engine computes on one core, starts on one, and waits in
# between. In the order of tests/conftest.py; xdist's own puts the files of few tests last, and these
# are the slow ones.
BESIDE := --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 20
test: setup ## try every feature once (ten minutes)
	$(BIN)/pytest -m "not extended" $(BESIDE)

test-all: SHORT := 1
test-all: test-whole gpu-dry-run test-vllm test-numerics ## and what takes longer (half an hour)

# At once, not what `make test` tries and then the rest: tests of one file share engines.
test-whole: setup
	$(BIN)/pytest $(BESIDE)

# More cases, more requests and other servers of what `make test-all` tries once. Half an hour.
test-thorough: setup ## what is due before a release: more seeds, larger batches
	$(BIN)/pytest -m thorough $(BESIDE) --ignore tests/engine/test_full_width.py
	$(BIN)/pytest -m thorough tests/engine/test_full_width.py # takes 19 GiB, so nothing beside it

# Long forms of what tests/server does in a minute: kills, aborts and storms.
test-faults: setup ## attack servers: kills, signals, storms of aborts
	$(BIN)/pytest tests/faults -m faults --durations 20

# In a process of its own: engines on the CPU replace the kernels that it watches.
gpu-dry-run: setup ## find what a GPU's host would wait for, on CUDA tensors that do not exist
	$(BIN)/pytest tests/gpu_dry_run -m gpu_dry_run

# vLLM's CUDA build, which a machine without a GPU takes too: 9 GB, ten minutes to install. By
# default the newest, as `pip install 'vllm-dllm[cuda]'` does; of 0.32: vllm==0.32.0 torch===2.13.0.
# To change it, delete build/cuda-venv.
# The third "=" leaves out builds of torch for CPUs, where pip would prefer one.
CUDA_VLLM ?= vllm==0.33.0 torch===2.14.0
CUDA_ENV := build/cuda-venv
gpu-dry-run-cuda: $(CUDA_ENV)/.ready ## start engines of vLLM's CUDA build on GPUs that do not exist
	$(CUDA_ENV)/bin/pytest tests/cuda_build -m cuda_build

$(CUDA_ENV)/.ready: pyproject.toml
	"$(PYTHON)" -m venv $(CUDA_ENV)
	$(CUDA_ENV)/bin/python -m pip install --no-compile --disable-pip-version-check --quiet \
	  --editable '.[cuda,fa4]' $(CUDA_VLLM) pytest
	@touch $@

# Ray beside what .venv has: 100 MB, a quarter of a minute to install.
RAY_ENV := build/ray-venv
SITE_PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
test-ray: $(RAY_ENV)/.ready ## run servers on Ray
	$(RAY_ENV)/bin/python -m pytest tests/on_ray -m on_ray

$(RAY_ENV)/.ready: $(READY)
	$(BIN)/python -m venv --without-pip $(RAY_ENV)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE_PACKAGES))')" \
	  > "$$($(RAY_ENV)/bin/python $(SITE_PACKAGES))/main.pth"
	$(RAY_ENV)/bin/python -m pip install --no-compile --disable-pip-version-check --quiet \
	  'ray[serve]==2.60.0'
	@touch $@

# As older, newer and other processors compute: vector widths, kernels of the libraries, threads.
# SHORT=1: one setting, the tests that take seconds.
test-numerics: setup ## run the numeric tests as other processors compute (SHORT=1: some)
	$(BIN)/python scripts/numerics.py $(if $(SHORT),--short)

# What a GPU's pip installs is newer than the newest vLLM for CPUs. An environment of its own: 340 MB
# to download, deleted afterwards.
VLLM ?= 0.33.0
TESTS ?= tests/unit/compat tests/unit/cpu tests/engine/test_one_step.py tests/engine/test_scheduling.py
test-vllm: setup ## check another vLLM and run tests with it (VLLM=0.33.0 TESTS=tests/engine)
	$(BIN)/python scripts/try_vllm.py $(VLLM) $(TESTS) $(BESIDE)

lint: setup ## ruff, import-linter, bandit, mypy, and what they cannot know
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/lint_project.py
	$(BIN)/lint-imports --no-logo
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive vllm_dllm attention_kernels
	$(BIN)/mypy

docs: setup ## build the documentation into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open build/site/index.html, or run: $(BIN)/mkdocs serve"

# From a clean slate: setuptools puts what an older build left behind into the wheel, too.
wheel: setup ## build dist/vllm_dllm-*.whl, which needs no clone
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

bench: setup ## measure serving on this machine
	$(BIN)/python -m bench.serving

# The Triton that `.[cuda]` installs, beside that of requirements/cpu.txt: 250 MB, kept in build/.
TRITON_OF_CUDA := build/triton-3.8.0
codegen: setup ## compile the GPU kernels, write attention_kernels/CODEGEN.md
	@test -d $(TRITON_OF_CUDA) || $(PIP_INSTALL) --quiet --no-deps \
	  --target $(TRITON_OF_CUDA) triton==$(TRITON_OF_CUDA:build/triton-%=%)
	$(BIN)/python -m bench.codegen
	PYTHONPATH=$(TRITON_OF_CUDA) $(BIN)/python -m bench.codegen

lock: setup ## resolve requirements/cpu.txt anew
	$(BIN)/python scripts/lock.py

clean: ## remove .venv and caches
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache
