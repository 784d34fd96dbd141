# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt

.PHONY: demo test soak lint bench clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mmcache needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python $(INPUTS)
	@echo "installing mmcache[demo] into $(VENV) (once)"
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(BIN)/python $(INPUTS)
	@echo "installing mmcache[test] into $(VENV) (once)"
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## encode real photographs through a real sidecar, three passes
	@$(BIN)/python -m examples.demo $(IMAGES)

test: $(VENV)/.test  ## every test that this machine can run
	$(BIN)/python -m pytest

soak: $(VENV)/.test  ## the same tests at full length
	MMCACHE_SOAK=1 $(BIN)/python -m pytest

lint: $(VENV)/.test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
