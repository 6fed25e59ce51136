# Two commands: 'make demo' and 'make test'. Both install into .venv first, which takes no time where it is current.
#
# Needs Python >= 3.11, make and a C++ compiler. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format schema clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## create .venv and install the package with everything that 'demo' and 'test' need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "tilegym-db needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing tilegym-db[all,dev] into $(VENV) (about 3 GB; a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $@

demo: install ## check, compile, bench, query and patch, end to end, in a few minutes
	$(BIN)/tilegym-db demo

test: lint ## format, lint, types, layer contracts, then every test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: install ## everything of 'test' that runs no test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## format the sources and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: install ## write schema/*.schema.json from the records
	$(BIN)/python -m tilegym_db.records.schema schema

clean: ## remove .venv and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
