# Everything runs in .venv, which the first target that needs it makes. Each target may be run alone
# on a fresh clone; the second run of each starts in seconds.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NODE_READY := harnesses/node/node_modules/.ready
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup demo test check test-harnesses test-demo test-long lock clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(READY)  ## Make the virtual environment with pinned dependencies

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,postgres,dev]'
	@touch $@

demo: $(READY)  ## Train the shop agent's policy end to end and plot what it learned
	$(BIN)/bridle demo $(DEMO_ARGS)

test: $(READY)  ## The default test suite
	$(BIN)/python -m pytest

check: $(READY)  ## Lint, format, types and the walls between the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-harnesses: $(READY) $(NODE_READY)  ## Installed Codex, Claude Code and LangChain through the proxy
	$(BIN)/python -m pytest -m harness

$(NODE_READY): harnesses/node/package-lock.json harnesses/node/install
	harnesses/node/install
	@touch $@

test-demo: $(READY)  ## The whole demo against its bars, and the learning rate of zero beside it
	$(BIN)/python -m pytest -m demo

test-long: $(READY)  ## What takes many minutes: deep property runs, soaks
	$(BIN)/python -m pytest -m long

lock: $(READY)  ## Pin what is installed now
	$(BIN)/python -m pip freeze --exclude-editable | sed -e 's| @ file.*||' -e 's|+cpu||' > constraints.txt

clean:  ## Remove the environments, not the runs
	rm -rf $(VENV) harnesses/node/node_modules
