PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
VENV := .venv
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed

.PHONY: venv test coverage test-comm test-engine test-rest test-slow test-slow-engine test-slow-recipes test-slow-rest
.PHONY: test-all gpu demo docs links lint clean

venv: $(STAMP)

# uv, where it is installed, needs a quarter of the time of pip. VERSIONS= takes the newest versions instead of those
# known to work together.
EXTRAS = accelerate,recipes,dev,bench
VERSIONS ?= -c constraints.txt
$(STAMP): pyproject.toml constraints.txt
	if command -v uv > /dev/null; then \
	    uv venv --quiet --seed --allow-existing --python $(PYTHON) $(VENV) && \
	    uv pip install --compile-bytecode --python $(VENV)/bin/python -e ".[$(EXTRAS)]" $(VERSIONS); \
	else \
	    $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install -e ".[$(EXTRAS)]" $(VERSIONS); \
	fi
	touch $(STAMP)

# Three parts side by side, each with ranks of its own: while ranks of one wait, two cores are busy with the others.
# Hundreds of interpreters are started: none compiles again what another one has, whatever the environment says of it.
TEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)/bin/python $(UNDER) -m pytest $(CASES)
# What they print is passed on line by line, so that no line of one is in a line of another.
BY_LINE = 2>&1 | sed --unbuffered ""
SIDE_BY_SIDE = $(MAKE) --jobs=3 --keep-going
FIRST_HALF = tests/engine/test_[0-9a-o]*.py
COMM = tests/comm tests/cuda_harness
ENGINE = tests/engine tests/fsdp2_parity tests/outer tests/planner tests/recipes
REST = tests $(COMM:%=--ignore=%) $(ENGINE:%=--ignore=%)
SLOW_ENGINE = tests/engine tests/lightning tests/fsdp2_parity tests/benchmarks tests/checkpoint tests/snapshots \
    tests/test_every_chain.py
SLOW_RECIPES = tests/recipes tests/comm tests/planner tests/cuda_harness
SLOW_REST = tests $(SLOW_ENGINE:%=--ignore=%) $(SLOW_RECIPES:%=--ignore=%)

test: venv
	@echo "Three parts of the fast tier run side by side; each says how far it is, and at its end what it found."
	@$(SIDE_BY_SIDE) test-comm test-engine test-rest

test-comm: venv
	$(TEST) -m "not slow" $(COMM) $(FIRST_HALF) $(BY_LINE)

test-engine: venv
	$(TEST) -m "not slow" $(ENGINE) --ignore-glob=$(FIRST_HALF) $(BY_LINE)

test-rest: venv
	$(TEST) -m "not slow" $(REST) $(BY_LINE)

# Launchers, interpreters, kills and benchmarks. CASES=--every-case also runs what no tier runs.
test-slow: venv
	@echo "Three parts of the slow tier run side by side; each says how far it is, and at its end what it found."
	@$(SIDE_BY_SIDE) test-slow-engine test-slow-recipes test-slow-rest

test-slow-engine: venv
	$(TEST) -m slow $(SLOW_ENGINE) $(BY_LINE)

test-slow-recipes: venv
	$(TEST) -m slow $(SLOW_RECIPES) $(BY_LINE)

test-slow-rest: venv
	$(TEST) -m slow $(SLOW_REST) $(BY_LINE)

test-all:
	$(MAKE) test
	$(MAKE) test-slow

# Lines and branches of the package and the recipes that the fast tier takes, on ranks and in interpreters also.
coverage: venv
	$(VENV)/bin/python -m coverage erase
	$(MAKE) test UNDER="-m coverage run"
	$(VENV)/bin/python -m coverage combine --quiet
	$(VENV)/bin/python -m coverage report --sort=cover

# On a machine with a GPU and a CUDA build of torch, in the Python that has it: nothing is installed.
OUT ?= gpu-results
gpu:
	OUT='$(OUT)' $(PYTHON) -m tests.gpu.first_run $(PARTS) $(if $(K),-k '$(K)')

demo: venv
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m recipes.pretrain --config recipes/llama/demo.yaml

# The site of docs/, in docs/_build/html. It needs what the venv has: the reference is read from the imported package.
# -E writes all pages: each has the sidebar of all.
docs: $(DOCS_STAMP)
	$(VENV)/bin/python -m sphinx -E -W --keep-going docs docs/_build/html

links: $(DOCS_STAMP)
	$(VENV)/bin/python -m sphinx -E -b linkcheck docs docs/_build/links

$(DOCS_STAMP): $(STAMP)
	if command -v uv > /dev/null; then \
	    uv pip install --python $(VENV)/bin/python -e ".[docs]" $(VERSIONS); \
	else \
	    $(VENV)/bin/python -m pip install -e ".[docs]" $(VERSIONS); \
	fi
	touch $(DOCS_STAMP)

lint: venv
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
