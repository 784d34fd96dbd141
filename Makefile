# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt

# Most of a test's time is waiting: two at once take little more than half as long. A file's tests stay together.
AT_ONCE ?= --numprocesses 2 --dist loadfile

# Resizing has the same bits on the Pillow that the rest is tested with and on the next one.
OTHER_VENV  := .venv-pillow13
OTHER_TESTS := tests/encoder/test_resize.py tests/encoder/test_preprocess.py tests/encoder/test_sizing.py

.PHONY: demo test test-pillow soak lint clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mmcache needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python $(INPUTS)
	@echo "installing mmcache[demo] into $(VENV) (once)"
	@$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.test: $(BIN)/python $(INPUTS)
	@echo "installing mmcache[test] into $(VENV) (once)"
	@$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo  ## encode real photographs through a real sidecar, three passes
	@$(BIN)/python -m examples.demo $(IMAGES)

test: $(VENV)/.test test-pillow  ## every test that this machine can run
	$(BIN)/python -m pytest $(AT_ONCE)

$(OTHER_VENV)/.test: $(BIN)/python $(INPUTS)
	@echo "installing another Pillow into $(OTHER_VENV) (once)"
	@$(PYTHON) -m venv $(OTHER_VENV)
	@$(OTHER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'pillow>=13,<14' numpy pytest hypothesis
	@touch $@

test-pillow: $(OTHER_VENV)/.test  ## resizing on another Pillow
	$(OTHER_VENV)/bin/python -m pytest -p no:cacheprovider $(OTHER_TESTS)

soak: $(VENV)/.test  ## the same tests at full length
	MMCACHE_SOAK=1 $(BIN)/python -m pytest $(AT_ONCE)

lint: $(VENV)/.test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OTHER_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
