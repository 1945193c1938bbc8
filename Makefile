# Every target makes .venv when it is missing and reuses it afterwards. All paths are relative: a folder with spaces works.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.DEFAULT_GOAL := help
.PHONY: help demo setup test lint format bench docs clean

help:  ## Show the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: $(VENV)/.run  ## Train MoSE on the embedded data, evaluate it, write the report to runs/demo
	$(BIN)/ambiseg demo --out runs/demo

# The stamps are written last, so an interrupted installation is taken up again.
$(VENV)/.run: pyproject.toml constraints.txt
	@echo "set-up, once: .venv with PyTorch, Lightning, MONAI and others, about 2 GB; a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) ".[all]"
	@touch $@
	@echo "set-up done"

setup: $(VENV)/.dev  ## Make .venv and install ambiseg with everything the tests need

$(VENV)/.dev: pyproject.toml constraints.txt
	@echo "set-up, once: .venv with PyTorch, Lightning, MONAI, the linters and others, about 2 GB; a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) ".[dev]"
	@touch $@ $(VENV)/.run
	@echo "set-up done"

test: setup lint  ## Lint, check types, run all tests and doctests
	$(BIN)/python -m pytest -n auto --maxprocesses 8

lint: setup  ## ruff (rules and format), pyright, and TypeScript on the page's modules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tools/check_js.py

format: setup  ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## Print the benchmark tables and write them to benchmarks/results/
	$(BIN)/python -m benchmarks

docs: setup  ## Build the documentation into docs/_build/html
	$(PIP) ".[docs]"
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	@echo "open docs/_build/html/index.html"

clean:  ## Remove what the other targets made
	rm -rf $(VENV) docs/_build build dist .pytest_cache .ruff_cache .hypothesis
