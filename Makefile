# Two environments: .venv holds the gateway and its tools, .venv-engine vLLM and Mooncake.
# Both are made from pinned locks; a stamp in each says that it is complete.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
GATEWAY := .venv/.installed
ENGINE := .venv-engine/.installed
BIN := .venv/bin
PIP := --disable-pip-version-check
REAL := build/real
DEMO := build/run

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Ctrl-C is how one ends `run` and `real`, and no error: 130 becomes 0, which the shell must
# live to see.
.PHONY: help test check lint format run real lock clean distclean python libibverbs

help: ## Show this.
	@echo "Targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "PYTHON=... takes another interpreter (3.11 or newer; the engines' packages need 3.11)."

test: $(GATEWAY) $(ENGINE) ## Run all tests, those against real vLLM engines included.
	$(BIN)/pytest -n auto -m "not engine"
	$(BIN)/pytest -m engine

check: lint ## Run the linters and the fast tests; needs no engine.
	$(BIN)/pytest -n auto -m "not engine"

lint: $(GATEWAY) ## Run ruff, mypy and the import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(GATEWAY) ## Format the sources.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

run: $(GATEWAY) ## Run the gateway on port 8000 before four emulated engines: no GPU, no model.
	@mkdir -p $(DEMO)
	@trap : INT; $(BIN)/mooncake-gateway serve --emulate 4 -c $(DEMO)/gateway.yaml || test $$? -eq 130

real: $(GATEWAY) $(ENGINE) ## Run the gateway on port 8000 before two real engines and a real pool.
	$(BIN)/mooncake-connector tiny-model $(REAL)/tiny-qwen3
	trap : INT; $(BIN)/mooncake-connector up examples/real/fleet.yaml --log-dir $(REAL)/logs \
	  --gateway-config $(REAL)/gateway.yaml \
	  --then '$(BIN)/mooncake-gateway serve -c $(REAL)/gateway.yaml' \
	  --then-url http://127.0.0.1:8000/ready || test $$? -eq 130

lock: | python ## Pin anew what pip resolves today.
	$(PYTHON) requirements/lock.py gateway
	$(PYTHON) requirements/lock.py engine-cpu

clean: ## Remove what was built; the environments stay.
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environments too.
	rm -rf .venv .venv-engine

$(GATEWAY): requirements/gateway.lock pyproject.toml | python
	$(PYTHON) -m venv .venv
	@echo "installing the gateway and its tools into .venv"
	$(BIN)/python -m pip install $(PIP) --quiet -r requirements/gateway.lock
	$(BIN)/python -m pip install $(PIP) --quiet --no-deps --editable .
	@touch $@

# The import shows that torch fits vLLM and that Mooncake finds its libraries.
$(ENGINE): requirements/engine-cpu.lock | python libibverbs
	$(PYTHON) -m venv .venv-engine
	@echo "installing vLLM and Mooncake into .venv-engine (about 2.5 GB)"
	@if test -t 1; then progress=; else progress=--quiet; fi; \
	.venv-engine/bin/python -m pip install $(PIP) $$progress --no-deps \
	  -r requirements/engine-cpu.lock || { \
	  echo; \
	  echo "The engines' packages could not be installed. If pip found no torch of a version"; \
	  echo "that ends in +cpu, it is offered no CPU build: add PyTorch's CPU wheel index, e.g."; \
	  echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make $(MAKECMDGOALS)"; \
	  exit 1; } >&2
	.venv-engine/bin/python -c "import mooncake.store, vllm"
	@touch $@

python:
	@test -n "$(PYTHON)" || { echo "no python3 found; install Python 3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version); Python 3.11 or newer is needed:" \
	    "install it, or name one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "$(PYTHON) cannot make environments; on Debian: apt-get install python3-venv" >&2; \
	  exit 1; }

# Mooncake is linked against it, with TCP too.
libibverbs:
	@if PATH="$$PATH:/usr/sbin:/sbin" ldconfig -p | grep -q 'libibverbs\.so\.1'; then exit 0; fi; \
	install='apt-get install --yes --no-install-recommends libibverbs1'; \
	if ! command -v apt-get >/dev/null; then \
	  echo "Mooncake needs libibverbs.so.1 (rdma-core); install it and run make again" >&2; exit 1; \
	elif test "$$(id -u)" = 0; then apt-get update && DEBIAN_FRONTEND=noninteractive $$install; \
	elif sudo -n true 2>/dev/null; then sudo -n apt-get update && sudo -n $$install; \
	else \
	  echo "Mooncake needs Debian's libibverbs1. Run this, then make again:" >&2; \
	  echo "  sudo apt-get update && sudo $$install" >&2; exit 1; \
	fi
