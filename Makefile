# Two commands: 'make demo' and 'make test'. Both install into .venv first, which takes no time where it is current.
#
# Needs Python 3.11 to 3.13, make and a C++ compiler; PyPI is the only package index that must be reachable.
#   PYTHON=python3.12    another interpreter
#   TORCH_BACKEND=cpu    another build of PyTorch than the one that fits this machine (uv's --torch-backend: auto, cpu, cu130, ...)

PYTHON ?= python3
TORCH_BACKEND ?= auto
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VERSIONS ?= oldest
# Files with slow tests come first (tests/conftest.py), so neither process waits long for the other, and fixtures of a module are made once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
DAILY := not alone and not nightly
# Collecting the tests takes longer than the few that run alone, so pytest reads only their files.
ALONE := $(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' 'mark\.alone' tests)
# Without caches of bytecode each of hundreds of processes would compile every module anew, and pytest rewrite every test.
unexport PYTHONDONTWRITEBYTECODE
# The checks run beside the tests and are printed after them. A test that fails runs once more when all else is done, if AGAIN is set.
# A test that passes then depends on load or on the tests before it: the summary lists it, and its author mends it.
define CHECKS_AND_TESTS
@log=$$(mktemp); $(MAKE) --no-print-directory check >$$log 2>&1 & checks=$$!; \
$(1); tests=$$?; \
wait $$checks; checks=$$?; echo "==== checks ===="; cat $$log; rm -f $$log; \
if test $$tests -eq 1 -a -n "$(AGAIN)"; then \
  echo "==== tests that failed, once more: mend those that the summary lists as PASSED ===="; \
  $(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "$(DAILY)" -rpfE; tests=$$?; \
fi; \
if test $$tests -ne 0; then echo "==== tests failed ===="; fi; if test $$checks -ne 0; then echo "==== checks failed ===="; fi; \
test $$tests -eq 0 -a $$checks -eq 0
endef
UV_INSTALL := $(BIN)/uv pip install --python $(BIN)/python -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all bounds check check-types check-rest docs resolve format schema clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

install: $(STAMP) ## create .venv and install the package with everything that 'demo' and 'test' need

# uv finds the build of PyTorch for this machine's GPU driver, or the small one for CPUs, in PyTorch's own index. Where that index
# cannot be reached, PyPI's build is taken: it drives any GPU of a current driver and runs on CPUs, and is larger.
# A torch that is installed already says nothing about that index, so the probe asks as if there were none.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "tilegym-db needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt uv
	@if $(UV_INSTALL) -q --dry-run --reinstall-package torch --torch-backend=$(TORCH_BACKEND) torch >$(VENV)/torch-index.log 2>&1; then \
	  echo "installing tilegym-db[all,dev] into $(VENV) with the build of PyTorch for this machine (TORCH_BACKEND=$(TORCH_BACKEND))"; \
	  $(UV_INSTALL) --torch-backend=$(TORCH_BACKEND) -e '.[all,dev]'; \
	else \
	  echo "installing tilegym-db[all,dev] into $(VENV) with PyPI's build of PyTorch, 6.5 GB in all: PyTorch's own index did not answer ($(VENV)/torch-index.log)"; \
	  $(UV_INSTALL) -e '.[all,dev]'; \
	fi
	@touch $@

demo: install ## check, compile, bench, query and patch, end to end, in a few minutes
	$(BIN)/tilegym-db demo

test: AGAIN := yes
test: install ## the checks, and beside them the tests: of shipped records those that changed, and today's sample
	$(call CHECKS_AND_TESTS,$(PYTEST) -m "$(DAILY)")

test-all: install ## the checks and every test, those that measure time last: nightly, and before a release
	$(call CHECKS_AND_TESTS,{ $(PYTEST) -m "not alone" --all-records; beside=$$?; $(ALONE) && (exit $$beside); })

bounds: install ## the tests with the oldest versions that pyproject.toml allows; VERSIONS=newest for the newest
	@test "$(VERSIONS)" = oldest -o "$(VERSIONS)" = newest || { echo "VERSIONS is oldest or newest, not '$(VERSIONS)'"; exit 2; }
	$(BIN)/uv venv -q --allow-existing --python $(BIN)/python .venv-$(VERSIONS)
	$(BIN)/uv pip install -q --python .venv-$(VERSIONS)/bin/python $(if $(filter oldest,$(VERSIONS)),--resolution lowest-direct) -e '.[all,dev]'
	$(subst $(BIN)/,.venv-$(VERSIONS)/bin/,$(PYTEST)) -m "$(DAILY)"

check: install ## format, lint, types, layer contracts and records; runs no test
	@$(MAKE) --no-print-directory -j 2 check-types check-rest

check-types:
	$(BIN)/mypy

# In a home of its own: traces that a developer measured must not make up for what the checkout lacks.
check-rest:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_language.py
	@home=$$(mktemp -d) && TILEGYM_DB_HOME=$$home $(BIN)/tilegym-db check --static; status=$$?; rm -rf "$$home"; exit $$status

docs: install ## build the documentation site into build/site; a warning or a broken link fails it
	$(BIN)/python tools/build_site.py -o build/site

resolve: install ## resolve every extra on every supported Python against PyPI alone, which installs nothing
	$(BIN)/python tools/resolve_extras.py

format: install ## format the sources and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schema: install ## write schema/*.schema.json from the records
	$(BIN)/python -m tilegym_db.published.schema schema

clean: ## remove .venv and caches
	rm -rf $(VENV) .venv-oldest .venv-newest build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
