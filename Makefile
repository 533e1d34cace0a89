# make quickstart     train a small policy end to end on this machine's CPU, about three minutes on two cores
# make language-model a language model of 135 M parameters from the package index learns sums; TASK=reasoning_gym, TASK=gsm8k
# make test           the tests to run before a commit: real Megatron-core ranks, a real vLLM server, a run that learns
# make test-all       every test: test-cpu, study-smoke, test-megatron-next, test-engines, test-integrations, test-verifiers,
#                     test-browser, test-install, test-slurm, test-null-gpu, test-language-model
# make test-cpu       all tests that need only this environment, slow ones and test-parallel included; lint runs tests/house
# make test-parallel  every parallel layout trains as one process does; kill -9 and resume in several of them
# make test-megatron-next  one layout of each kind, and resuming, with the newest Megatron-core; two minutes
# make test-engines   the engine contract, weight transports and faults, on real vLLM and SGLang servers
# make test-integrations  our losses inside TRL, verl and SkyRL, environments of other packages; in .venv-integrations (1.9 GB, created when needed)
# make test-verifiers  environments of verifiers, with their requirements in .venv/verifiers (90 MB, created when needed)
# make test-browser   the page of `dppo-megatron view` in headless Chromium, which it installs (Debian, as root or with sudo)
# make test-install   every extra of setup.py and the locks of GPU machines, resolved against the package index; half a minute
# make test-slurm     runs by sbatch on a real Slurm on loopback, which it installs (Debian, as root or with sudo)
# make test-null-gpu  the trainer's CUDA paths on a null device, vLLM's CUDA wheel; in .venv-null-gpu (3.6 GB, Python 3.12, created when needed)
# make test-language-model  SmolLM2-135M of the package index (93 MB) in every part of a run, 20 minutes; skipped without it
# make study-smoke    a two-minute study: task, start policy, one method, two seeds
# make attack         tests/attack with another seed and more cases: ATTACK_SEED=N ATTACK_CASES=N make attack
# make test-gpu       on a machine with a GPU, twelve minutes: kernels, training, offload, a colocated engine; writes a file
# make lint           ruff, mypy, layers of imports, wording, docs-check, the rules of tests/house (sizes, names)
# make docs           the documentation site in site/, with the API reference from docstrings; warnings and broken links fail
# make docs-check     check that links, files, commands, flags, settings and figures named in the docs exist
# make format         format with ruff, and apply its fixes
# make install        the pinned CPU environment in .venv (other targets create it when needed)
# make sglang         SGLang's own pinned CPU environment in .venv-sglang, 3.3 GB (for engine.kind: sglang)
# make environments   every other environment that test-all needs
# make clean          remove the environments and build files, but no runs

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
INTEGRATIONS_VENV := .venv-integrations
INTEGRATIONS_STAMP := $(INTEGRATIONS_VENV)/.installed
NULL_GPU_VENV := .venv-null-gpu
NULL_GPU_STAMP := $(NULL_GPU_VENV)/.installed
# A pyenv shim may exist but fail to run.
NULL_GPU_PYTHON ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python3.12; do \
  $$p -c '' 2>/dev/null && { echo $$p; break; }; done)
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
# Hundreds of processes import the same modules. If the environment says not to keep compiled ones, each compiles them all.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help quickstart language-model study-smoke test test-all test-here test-elsewhere environments test-cpu test-engines test-gpu test-megatron-next test-parallel test-slurm test-integrations test-verifiers test-browser test-install test-null-gpu test-language-model attack lint types docs docs-check format install sglang clean

# The first target is the default.
help:
	@sed -n '/^#/!q; s/^# //p' $(firstword $(MAKEFILE_LIST))

quickstart: install
	$(BIN)/python examples/quickstart/run.py

TASK ?= sums
GYM := $(VENV)/reasoning-gym
language-model: install $(if $(filter reasoning_gym,$(TASK)),$(GYM)/.installed)
	$(if $(filter reasoning_gym,$(TASK)),PYTHONPATH=$(CURDIR)/$(GYM) )$(BIN)/python examples/language_model/run.py --task $(TASK)

# Of the slow tests, SHARD=0, 1 or 2 runs a third and one case of each kind (tests/schedule.py). RESULTS=DIRECTORY keeps JUnit files.
SHARD ?= all
SUPERVISED := tests/support/supervised.py -m pytest --durations=25 --durations-min=1
PYTEST_ARGS = $(SUPERVISED) --shard $(SHARD) $(if $(RESULTS),--junitxml $(RESULTS)/$@.xml)
PYTEST = $(BIN)/python $(PYTEST_ARGS)
# Tests often wait for a server or a time-out, so two processes share the cores. WORKERS=0 uses one process.
WORKERS ?= 2
SIDE_BY_SIDE := -n $(WORKERS) --dist loadscope --no-loadscope-reorder

test: install
	$(PYTEST) tests $(SIDE_BY_SIDE)

# `make lint` runs tests/house.
test-cpu: install
	$(PYTEST) tests --ignore tests/house $(SIDE_BY_SIDE) -m "not engines and not faults and not slurm and not integrations and not browser and not registry and not null_gpu and not language_model"

test-all: test-here test-elsewhere

# test-here needs only .venv, test-elsewhere also `environments`. Two jobs run at a time: the largest, and the others in turn.
test-here:
	$(MAKE) --jobs 2 test-cpu $(if $(filter all 1,$(SHARD)),study-smoke) test-megatron-next
test-elsewhere:
	$(MAKE) --jobs 2 test-engines test-slurm test-integrations test-verifiers test-browser test-install test-null-gpu test-language-model

test-parallel: install
	$(PYTEST) tests/parallel -m ""
	$(PYTEST) tests --ignore tests/parallel -m parallel

# The version that pip installs from Python 3.12 on; it also runs on 3.11. PYTHONPATH puts it before the pinned version. It
# imports Triton.
NEXT_MEGATRON := 0.19.2
NEXT := $(CURDIR)/$(VENV)/megatron-next
WITH_NEXT := PYTHONPATH=$(NEXT):$(CURDIR)/$(VENV)/triton-interpreter
$(NEXT)/.$(NEXT_MEGATRON): $(STAMP)
	rm -rf $(NEXT)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --ignore-requires-python --target $(NEXT) megatron-core==$(NEXT_MEGATRON)
	touch $@

test-megatron-next: install $(NEXT)/.$(NEXT_MEGATRON)
	$(WITH_NEXT) $(BIN)/python -W ignore -c 'import megatron.core as m; assert m.__version__.startswith("$(NEXT_MEGATRON)"), (m.__version__, m.__file__)'
	$(WITH_NEXT) $(PYTEST) tests/parallel tests/train/actor -m "megatron_next $(if $(filter all 2,$(SHARD)),,and smoke)"

# The slurmd of the tests needs root to start jobs. Without root and sudo, the tests are skipped with that reason. The lock
# timeout is for other targets that install at the same time.
APT_GET := apt-get -y -qq -o DPkg::Lock::Timeout=300
APT := $(APT_GET) install --no-install-recommends slurm-wlm slurm-client slurmctld slurmd munge
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] || { sudo -n true 2>/dev/null && \
  echo sudo -n --preserve-env=OMP_NUM_THREADS,HF_HUB_OFFLINE PYTHONDONTWRITEBYTECODE=1; })
test-slurm: install
	@{ command -v slurmctld && command -v munged; } >/dev/null || $(AS_ROOT) sh -c '$(APT) || { $(APT_GET) update && $(APT); }' \
	  || echo "Slurm is not installed, and apt-get cannot install it here"
	$(AS_ROOT) $(PYTEST) tests/run/slurm -m slurm

# If Chromium cannot be installed, the tests are skipped with that reason.
CHROMIUM := $(APT_GET) install --no-install-recommends chromium-headless-shell
test-browser: install $(VENV)/browser/.installed
	@{ command -v chromium-headless-shell || command -v chromium || command -v google-chrome; } >/dev/null || \
	  $(AS_ROOT) sh -c '$(CHROMIUM) || { $(APT_GET) update && $(CHROMIUM); }' || echo "Chromium cannot be installed here"
	PYTHONPATH=$(CURDIR)/$(VENV)/browser $(PYTEST) tests/lab/view -m browser

# Only the folders that have such tests, because collecting all tests takes 20 s. The longest group is first.
ENGINE_TESTS = $(sort $(dir $(shell grep -rlE 'mark\.(engines|faults)' tests --include '*.py')))
test-engines: install sglang
	$(PYTEST) tests/faults $(filter-out tests/faults/,$(ENGINE_TESTS)) $(SIDE_BY_SIDE) -m "engines or faults"

test-install: install
	$(PYTEST) tests/install -m registry

study-smoke: install
	rm -rf runs/chains-smoke
	$(BIN)/python studies/chains/prepare.py --root runs/chains-smoke --updates 10
	$(BIN)/dppo-megatron study studies/chains/smoke.yaml --out runs/chains-smoke/study

test-integrations: $(INTEGRATIONS_STAMP)
	PYTHONPATH=$(CURDIR) $(INTEGRATIONS_VENV)/bin/python $(PYTEST_ARGS) tests/integrations -m ""

test-verifiers: install $(VENV)/verifiers/.installed
	$(PYTEST) tests/integrations/test_verifiers.py -m integrations

# Without Python 3.12 or a compiler, the tests are skipped with a message.
test-null-gpu: $(NULL_GPU_STAMP)
	@[ ! -e $(NULL_GPU_STAMP) ] || $(NULL_GPU_VENV)/bin/python -m tests.null_gpu.device $(NULL_GPU_VENV)/device \
	  $(NULL_GPU_VENV)/bin/python $(PYTEST_ARGS) tests/null_gpu $(SIDE_BY_SIDE) -m null_gpu

# The rows that read one run are in a shard. The slow ones, which need SGLang, are in none.
test-language-model: install $(if $(filter all,$(SHARD)),sglang)
	$(PYTEST) tests/language_model -m "language_model $(if $(filter all,$(SHARD)),,and not slow)"

attack: install
	$(PYTEST) tests/attack -m ""

# GPU_PYTHON must have torch for CUDA, unlike $(VENV). docs/gpu_day.md lists its packages.
GPU_PYTHON ?= python3
test-gpu:
	$(GPU_PYTHON) benchmarks/gpu_day.py

lint: install docs-check types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/check_words.py
	$(BIN)/python -m pytest -q tests/house

types: install
	$(BIN)/mypy

docs-check: install
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/check_claims.py

docs: install $(VENV)/docs/.installed
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR):$(CURDIR)/$(VENV)/docs $(BIN)/python -m mkdocs build --quiet --strict
	$(BIN)/python tools/check_site.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

# Hundreds of processes start with imports, and garbage collections take a fifth of their time with Python's threshold of 700.
COLLECT_LESS = echo 'import gc; gc.set_threshold(10_000, 10, 10)' > $(1)/lib/python3.11/site-packages/collect_less.pth

# --no-compile: a module is compiled when it is first imported. pip would compile them all, which takes most of its time.
# torch is installed first, with its dependencies: a CUDA build needs its libraries, the CPU build needs none.
$(STAMP): requirements/cpu.lock setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 is needed (the pinned CPU environment is for it); set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint requirements/cpu.lock torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --requirement requirements/cpu.lock
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --no-build-isolation --editable .
	@# Triton is for the kernels' interpreter tests. It has its own directory, because vLLM's CPU build would infer a GPU from it.
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(VENV)/triton-interpreter triton==3.9.0
	$(call COLLECT_LESS,$(VENV))
	touch $(STAMP)

# Packages that only one target needs are in a directory of .venv that the target adds to PYTHONPATH.
$(VENV)/%/.installed: requirements/%.lock $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target $(@D) --requirement $<
	touch $@

sglang: $(SGLANG_STAMP)

environments: sglang $(INTEGRATIONS_STAMP) $(VENV)/verifiers/.installed $(VENV)/browser/.installed $(VENV)/docs/.installed $(NULL_GPU_STAMP)

$(SGLANG_STAMP): requirements/sglang-cpu.lock
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile --constraint requirements/sglang-cpu.lock torch==2.13.0
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/sglang-cpu.lock
	$(call COLLECT_LESS,$(SGLANG_VENV))
	touch $(SGLANG_STAMP)

$(INTEGRATIONS_STAMP): requirements/integrations.lock
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --no-compile --constraint requirements/integrations.lock torch==2.13.0
	@# SkyRL requires Python 3.12, but its losses run on 3.11; see tests/integrations/test_skyrl.py.
	$(INTEGRATIONS_VENV)/bin/python -m pip install --quiet --no-compile --no-deps --ignore-requires-python \
	  --requirement requirements/integrations.lock
	touch $(INTEGRATIONS_STAMP)

# TransformerEngine has its own directory and only its Python part. On the default path Megatron could not be imported, because
# the compiled part is missing.
TRANSFORMER_ENGINE := 2.20.2
# NVIDIA's packages are left out: tests/null_gpu/device.py makes the libraries that torch and vLLM load.
$(NULL_GPU_STAMP): requirements/null-gpu.lock setup.py
	@if [ -z "$(NULL_GPU_PYTHON)" ]; then echo "no Python 3.12 that runs (set NULL_GPU_PYTHON): test-null-gpu is skipped"; \
	elif ! command -v gcc >/dev/null; then echo "no gcc: test-null-gpu is skipped"; else \
	  $(NULL_GPU_PYTHON) -m venv $(NULL_GPU_VENV) && \
	  $(NULL_GPU_VENV)/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/null-gpu.lock && \
	  $(NULL_GPU_VENV)/bin/python -m pip install --quiet --no-compile --no-deps --target $(NULL_GPU_VENV)/transformer-engine \
	    transformer_engine==$(TRANSFORMER_ENGINE) && \
	  $(NULL_GPU_VENV)/bin/python -m pip install --quiet --no-compile --no-deps --no-build-isolation --editable . && touch $@; fi

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(INTEGRATIONS_VENV) $(NULL_GPU_VENV) build dist site *.egg-info
