PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: venv test test-engine test-frameworks test-rest test-slow test-slow-engine test-slow-recipes test-slow-rest
.PHONY: test-all gpu demo lint clean

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -e ".[accelerate,recipes,dev,bench]" -c constraints.txt
	touch $(STAMP)

# Three parts side by side, each with ranks of its own: while ranks of one wait, two cores are busy with the others.
TEST = OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest
ENGINE = tests/engine tests/cuda_harness tests/recipes
FRAMEWORKS = tests/accelerate tests/lightning tests/checkpoint
REST = tests --ignore-glob=tests/engine/test_*.py --ignore=tests/cuda_harness --ignore=tests/recipes
SLOW_ENGINE = tests/engine tests/checkpoint tests/lightning tests/planner
SLOW_REST = tests $(SLOW_ENGINE:%=--ignore=%) --ignore=tests/recipes

test: venv
	@echo "Three parts of the fast tier run side by side; each tells what it found when it ends."
	@$(MAKE) --jobs=3 --output-sync=target test-engine test-frameworks test-rest

test-engine: venv
	$(TEST) -m "not slow" $(ENGINE) --ignore=tests/engine/optimizer

test-frameworks: venv
	$(TEST) -m "not slow" $(FRAMEWORKS)

test-rest: venv
	$(TEST) -m "not slow" $(REST) $(FRAMEWORKS:%=--ignore=%)

# Launchers, interpreters, kills, benchmarks and the wide products of parameters.
test-slow: venv
	@echo "Three parts of the slow tier run side by side; each tells what it found when it ends."
	@$(MAKE) --jobs=3 --output-sync=target test-slow-engine test-slow-recipes test-slow-rest

test-slow-engine: venv
	$(TEST) -m slow $(SLOW_ENGINE)

test-slow-recipes: venv
	$(TEST) -m slow tests/recipes

test-slow-rest: venv
	$(TEST) -m slow $(SLOW_REST)

test-all:
	$(MAKE) test
	$(MAKE) test-slow

# On a machine with a GPU and a CUDA build of torch, in the Python that has it: nothing is installed.
OUT ?= gpu-results
gpu:
	PYTHON=$(PYTHON) OUT=$(OUT) tests/gpu/run

demo: venv
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m recipes.pretrain --config recipes/llama/demo.yaml

lint: venv
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
