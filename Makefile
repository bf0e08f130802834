# Every target makes .venv and installs what it needs by itself, and does nothing twice.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
N ?= 100
SEED ?= 1
# Tests wait more than they compute: processes and servers start and die in them.
WORKERS ?= 4
# pip finds local wheels by itself; uv has to be told. Compiled modules make every start faster.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export PYTHONDONTWRITEBYTECODE =

STDLIB = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')

.PHONY: install retrain up down test-fast test long check bench mutants operating-characteristics soak clean
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
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.structure

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

# State under .headway/ stays: it holds datasets and models. Its servers and endpoints are stopped.
clean:
	-test ! -x $(BIN)/headway || $(BIN)/headway down --yes --endpoints
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@if command -v uv >/dev/null; then uv venv --quiet --seed --python $(PYTHON) .venv; else $(PYTHON) -m venv .venv; fi

.venv/.%: .venv/bin/python pyproject.toml constraints.txt
	@if command -v uv >/dev/null; \
	then uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[$*]'; \
	else $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'; fi
	@touch $@
