PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: venv test test-comm test-engine test-rest test-slow test-slow-engine test-slow-recipes test-slow-rest
.PHONY: test-all gpu demo lint clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -e ".[accelerate,recipes,dev,bench]" -c constraints.txt
	touch $(STAMP)

# Three parts side by side, each with ranks of its own: while ranks of one wait, two cores are busy with the others.
TEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest
FIRST_HALF = tests/engine/test_[0-9a-o]*.py
COMM = tests/comm tests/cuda_harness
ENGINE = tests/engine tests/planner tests/recipes
REST = tests $(COMM:%=--ignore=%) $(ENGINE:%=--ignore=%)
SLOW_ENGINE = tests/engine tests/lightning tests/test_every_chain.py
SLOW_RECIPES = tests/recipes tests/comm tests/planner tests/cuda_harness
SLOW_REST = tests $(SLOW_ENGINE:%=--ignore=%) $(SLOW_RECIPES:%=--ignore=%)

test: venv
	@echo "Three parts of the fast tier run side by side; each tells what it found when it ends."
	@$(MAKE) --jobs=3 --keep-going --output-sync=target test-comm test-engine test-rest

test-comm: venv
	$(TEST) -m "not slow" $(COMM) $(FIRST_HALF)

test-engine: venv
	$(TEST) -m "not slow" $(ENGINE) --ignore-glob=$(FIRST_HALF)

test-rest: venv
	$(TEST) -m "not slow" $(REST)

# Launchers, interpreters, kills, benchmarks and the wide products of parameters.
test-slow: venv
	@echo "Three parts of the slow tier run side by side; each tells what it found when it ends."
	@$(MAKE) --jobs=3 --keep-going --output-sync=target test-slow-engine test-slow-recipes test-slow-rest

test-slow-engine: venv
	$(TEST) -m slow $(SLOW_ENGINE)

test-slow-recipes: venv
	$(TEST) -m slow $(SLOW_RECIPES)

test-slow-rest: venv
	$(TEST) -m slow $(SLOW_REST)

test-all:
	$(MAKE) test
	$(MAKE) test-slow

# On a machine with a GPU and a CUDA build of torch, in the Python that has it: nothing is installed.
OUT ?= gpu-results
gpu:
	OUT=$(OUT) $(PYTHON) -m tests.gpu.first_run $(PARTS)

demo: venv
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m recipes.pretrain --config recipes/llama/demo.yaml

lint: venv
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
