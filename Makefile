# Every target makes .venv and installs what it needs by itself, and does nothing twice.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
N ?= 100
SEED ?= 1
# Two a processor: tests wait for processes and servers as long as they compute. More only slow each other down (docs/testing.md).
WORKERS ?= 4
# pip finds local wheels by itself; uv has to be told. Compiled modules make every start faster.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export PYTHONDONTWRITEBYTECODE =
# Material for MkDocs advertises its successor at each build.
export NO_MKDOCS_2_WARNING = 1
# The index that torch, and nothing else, comes from: PyTorch's CPU builds where no NVIDIA driver is seen. Empty is the index of all other
# packages, where torch brings CUDA, and with PIP_FIND_LINKS the wheels there.
TORCH_INDEX ?= $(if $(PIP_FIND_LINKS)$(wildcard /proc/driver/nvidia/version)$(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

STDLIB = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')

.PHONY: install retrain up down test-fast test long check check-types check-rules pages docs bench mutants operating-characteristics soak constraints audit images images-refresh release gpu azure clean
.DEFAULT_GOAL := install

install: .venv/.local

retrain: .venv/.local
	$(BIN)/headway dataset publish python-stdlib "$(STDLIB)" --include '*.py' --exclude site-packages
	$(BIN)/headway retrain

# The platform, with two datasets to start runs on from Prefect's page.
up: .venv/.local
	$(BIN)/headway dataset publish python-stdlib "$(STDLIB)" --include '*.py' --exclude site-packages
	$(BIN)/headway dataset publish tiny flows tasks deployments --include '*.py'
	$(BIN)/headway up --detach

down: .venv/.local
	$(BIN)/headway down

# What a change is tried with first: types, lint, and every test that needs no process.
test-fast: check
	$(BIN)/python -m pytest -q -m unit -n 2 $(ARGS)

test: .venv/.dev
	$(BIN)/python -m pytest -m 'not soak and not long' -n $(WORKERS) --dist loadfile $(ARGS)

# What `make test` leaves out for the time it takes: every night.
long: .venv/.dev
	$(BIN)/python -m pytest -m 'long and not soak' -n $(WORKERS) --dist loadfile $(ARGS)

check: .venv/.dev
	@$(MAKE) --no-print-directory -j2 check-types check-rules

check-types: .venv/.dev
	$(BIN)/mypy

check-rules: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.structure
	$(BIN)/python -m benchmarks.prose --strings
	$(BIN)/python docs/make_surface.py --check
	$(BIN)/mkdocs build --strict --quiet

# Everything in docs/ that is written from the code: settings, surface, drawings, metrics, figures.
pages: .venv/.dev
	set -e; for name in architecture configuration estate monitoring proof python surface; do $(BIN)/python docs/make_$$name.py; done
	$(BIN)/headway deployments --prefect-yaml > prefect.yaml

# The site of docs/ in build/site, which is read from the disk: open build/site/index.html. DOCS_REPOSITORY=URL links it to source files.
docs: .venv/.dev
	$(BIN)/mkdocs build --strict

bench: .venv/.dev
	$(BIN)/python -m benchmarks $(ARGS)

# Whether the tests notice ten faults that are planted in copies of the tree: hours.
mutants: .venv/.dev
	$(BIN)/python -m benchmarks.mutants $(ARGS)

# How often each judgement is right, by simulations with known truth; a few minutes, ARGS=--quick seconds.
operating-characteristics: .venv/.dev
	$(BIN)/python -m benchmarks.operating_characteristics $(ARGS)

soak: .venv/.dev
	N=$(N) SEED=$(SEED) $(BIN)/python -m pytest -m soak -s $(ARGS)

# The newest versions that the bounds of pyproject.toml allow, tried at once: SMOKE is what must pass with them.
SMOKE ?= tests/unit tests/integration/flows/test_retrain.py
constraints: .venv/.dev
	$(BIN)/python -m benchmarks.supply constraints
	$(MAKE) .venv/.dev
	$(BIN)/python -m pytest -q $(SMOKE) $(ARGS)

# Known vulnerabilities of what constraints.txt names, and an SBOM of each extra in build/sbom/.
audit: .venv/.dev
	$(BIN)/python -m benchmarks.supply audit $(ARGS)

# All images of docker/, by buildah or docker; BASE=debian makes their base of Debian's packages, where no registry of images is reached.
images: .venv/bin/python
	$(BIN)/python -m benchmarks.images $(if $(BASE),--base $(BASE)) $(ARGS)

# What only real machines show, by the product's own jobs and commands: docs/proof/gpu.md on a machine with a GPU, in six minutes,
# and docs/proof/azure.md in a subscription, for about a dollar (docs/azure.md). ARGS=--rehearse runs the first on a CPU.
gpu: .venv/.local
	$(BIN)/python -m benchmarks.gpu $(ARGS)

azure: .venv/.local
	$(BIN)/python -m benchmarks.azure $(ARGS)

# Wheel, SBOMs, notes and their sums in build/release/VERSION, of a commit that `python -m benchmarks.release prepare VERSION` made ready;
# ARGS=--images builds the images too. Nothing is pushed.
release: check
	$(BIN)/python -m benchmarks.release build $(ARGS)

# The newest digest of each image that docker/ and .devcontainer/ name by tag and digest.
images-refresh: .venv/bin/python
	$(BIN)/python -m benchmarks.images --refresh

# State under .headway/ stays: it holds datasets and models. Its servers and endpoints are stopped.
clean:
	-test ! -x $(BIN)/headway || $(BIN)/headway down --yes --endpoints
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@echo "Making .venv"
	@if command -v uv >/dev/null; then uv venv --quiet --seed --python $(PYTHON) .venv; else $(PYTHON) -m venv .venv; fi

.venv/.%: .venv/bin/python pyproject.toml constraints.txt
	@echo "Installing Headway and what it needs into .venv: some minutes the first time (docs/install.md)"
	@if command -v uv >/dev/null; \
	then install="uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt"; \
	else install="$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt"; fi; \
	(trap 'kill $$! 2>/dev/null; exit' TERM; \
	 while :; do sleep 10 & wait; size=$$(du -sm .venv | cut -f1); echo "  $$size MB so far"; done) & \
	trap "kill $$!" EXIT; \
	$(if $(TORCH_INDEX),$$install --no-deps --index-url $(TORCH_INDEX) torch && )$$install -e '.[$*]'
	@touch $@
