# PYTHON picks the interpreter that makes the virtual environment: make run PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable
# What make bench measures: demo, and any model directories.
MODELS ?= demo
PROMPT := What is the capital of France?
# A package index that stumbles is asked again, by the pip that pip starts too.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
# Two files of tests at once: much of a test is one process that waits for another.
AT_ONCE := -n 2 --dist loadfile

.PHONY: run test test-full test-lowest lint bench clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed-demo
	@$(BIN)/caldrix run demo -p "$(PROMPT)"

test: lint
	@$(BIN)/python -m pytest $(AT_ONCE) -m "not slow"

test-full: lint
	@$(BIN)/python -m pytest $(AT_ONCE)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

# Every dependency at its lower bound of pyproject.toml.
test-lowest: $(LOWEST)/.installed
	@$(LOWEST)/bin/python -m pytest $(AT_ONCE) -m "not slow"

bench: $(VENV)/.installed-dev
	@$(BIN)/python -c "import llama_cpp" 2>/dev/null || { \
	  echo "caldrix: building llama.cpp to compare with; once, for some minutes" >&2; \
	  $(INSTALL) ".[bench]" >&2 || echo "caldrix: it cannot be built here: there will be no ratios" >&2; }
	@$(BIN)/python -m tests.bench $(MODELS:%=--model %)

clean:
	@rm -rf $(VENV) $(LOWEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-demo: EXTRAS := demo
$(VENV)/.installed-dev: EXTRAS := dev,demo

$(VENV)/.installed-%: $(VENV)/.created pyproject.toml
	@echo "caldrix: installing [$(EXTRAS)] into $(VENV)" >&2
	@$(INSTALL) ".[$(EXTRAS)]" >&2
	@touch $@

$(LOWEST)/.installed: pyproject.toml
	@$(MAKE) --no-print-directory VENV=$(LOWEST) $(LOWEST)/.created
	@grep -oE '"[A-Za-z0-9_-]+>=[0-9.]+' pyproject.toml | grep -vE 'hatchling|ruff|mypy|llama' | \
	  sed -e 's/"//' -e 's/>=/==/' > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable ".[dev,demo]" >&2
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "caldrix needs Python 3.11, 3.12 or 3.13, and '$(PYTHON)' is not one; name one as in: make $(or $(MAKECMDGOALS),run) PYTHON=python3.12" >&2; exit 1; }
	@echo "caldrix: creating $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV) >&2
	@touch $@
