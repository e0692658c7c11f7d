# `make demo` and `make test` do all their own set-up: they need make and Python 3.11 or later, nothing else.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := policies simulator conf engine kernels

.DEFAULT_GOAL := help
.PHONY: help demo test check docs soak fuzz mutation versions clean

help:
	@echo 'make demo    record, simulate, tune and validate on a small real model; writes demo/'
	@echo 'make test    ruff, mypy and every test that needs no GPU'
	@echo 'make check   ruff and mypy only'
	@echo 'make docs    the API, from docstrings: build/api/index.html'
	@echo 'make soak    100 kills at any moment, then 10,000 rounds with flat memory: half an hour'
	@echo 'make fuzz    100,000 damaged files for every reader: a quarter of an hour'
	@echo 'make mutation   60 faults seeded into the source: which of them the tests catch'
	@echo 'make versions   clean environments of Python 3.11-3.13 with older and newer torch, Optuna and Hydra'
	@echo 'make clean   remove what builds and checks left behind (not .venv, not demo/)'

demo: $(VENV)/.installed
	$(BIN)/specdial demo out=demo

# One thread a process: many small operations gain nothing from more, and two processes do.
# Bytecode is kept, whatever the environment says: every process that a test starts would compile everything anew.
# The script, not `python -m pytest`: that would put the checkout on the path, with a bare package named `kernels`.
test: check
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not gpu' -n auto --maxprocesses 8 --dist worksteal

docs: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/pdoc --output-directory build/api $(addprefix specdial.,$(PACKAGES))

soak: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/kill.py --kills 100
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py --rounds 10000

# With atheris where it is installed.
fuzz: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/$$($(BIN)/python -c 'import atheris' 2>/dev/null && echo guided || echo fuzz).py \
		--inputs 100000

mutation: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/mutation.py --faults 60

versions: | $(BIN)/python
	$(BIN)/python tests/versions/matrix.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p specdial.,$(PACKAGES))

$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'specdial needs Python 3.11 or later, and none was found; name one: make PYTHON=/path/to/python3' >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# An install is done once, and again when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo 'installing specdial into $(VENV): a few minutes the first time'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[report]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo 'installing specdial and its test tools into $(VENV): a few minutes the first time'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
