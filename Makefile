# `make demo` needs Python 3.11 or newer and a package index, and nothing else. `make help` lists the
# rest. Everything is installed into .venv, once; a change of pyproject.toml or constraints.txt
# installs again.
#
#   PYTHON=python3.12   another interpreter, when .venv is created
#   ARGS="-k sam -x"    more arguments for the command behind demo, test, soak, bench, conformance
#                       (bench: names of benchmarks, --pairs N)
#   FITSTEP_TORCH_PYTHON=/path/to/python   has torch, maybe lightning, to be benchmarked beside

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
SOURCES := .venv-sources
PIP := -m pip --disable-pip-version-check install --quiet --quiet

.PHONY: help demo setup test test-sources docs lint types conformance soak bench matrix clean interrupted

help:
	@echo "make demo         train the built-in experiment on German credit data"
	@echo "make setup        install what development needs"
	@echo "make test         the tests"
	@echo "make test-sources the tests of all sources of data, with torch and TensorFlow: 4 GB"
	@echo "make docs         only the tests that run the documentation"
	@echo "make lint         ruff: rules and format"
	@echo "make types        pyright"
	@echo "make conformance  Keras's own tests on fitstep's trainer"
	@echo "make soak         a thousand real interrupts of each model"
	@echo "make bench        the benchmarks, a quarter of an hour on an idle machine"
	@echo "make matrix       the tests on the newest Python, Keras, JAX, and on Keras's nightly build"
	@echo "make clean        remove all that was built, the environments too"
	@echo
	@echo "PYTHON=python3.12   another interpreter, when .venv is created"
	@echo 'ARGS="-k names -x"  more arguments for the command behind a target'

demo: $(VENV)/.ready-demo
	$(BIN)/fitstep train credit $(ARGS)

setup: $(VENV)/.ready-dev

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(ARGS)

docs: $(VENV)/.ready-dev
	$(BIN)/python -m pytest tests/docs $(ARGS)

test-sources: $(SOURCES)/.ready
	$(SOURCES)/bin/python -m pytest tests/sources $(ARGS)
	@$(SOURCES)/bin/python -c "$$VERSIONS"

soak: $(VENV)/.ready-dev
	FITSTEP_INTERRUPTS=1000 $(BIN)/python -m pytest tests/pains/test_p51_interrupts.py -k random_moments $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# The variable keeps pyright from asking the package index whether there is a newer one.
types: $(VENV)/.ready-dev
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

conformance: $(VENV)/.ready-dev
	$(BIN)/python tests/conformance/run.py $(ARGS)

bench: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) $(SOURCES) .venv-matrix-* .venv-nightly build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment ----------------------------------------------------------------------------
# Three stamps in a row, so that `make -j` installs one thing at a time. While something is being
# installed, .unfinished holds the process id of make; found later, it means that an installation
# was interrupted, and the environment is created anew rather than trusted.

UNFINISHED := $(VENV)/.unfinished

$(VENV)/.ready-python: $(if $(wildcard $(UNFINISHED)),interrupted)
	$(check-python)
	@echo "Creating $(VENV)"
	@rm -rf $(VENV) && mkdir $(VENV) && echo $$PPID > $(UNFINISHED)
	@$(PYTHON) -m venv $(VENV)
	@rm $(UNFINISHED) && touch $@

define check-python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  found=$$($(PYTHON) --version 2>&1) || found="not found"; \
	  echo "fitstep needs Python 3.11 or newer; $(PYTHON) is $$found. Name another:" \
	    "make $(firstword $(MAKECMDGOALS) demo) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) can't create virtual environments. On Debian and Ubuntu:" \
	    "apt-get install python3-venv" >&2; exit 1; }
endef

$(VENV)/.ready-demo: $(VENV)/.ready-python pyproject.toml constraints.txt
	$(call install,demo)

$(VENV)/.ready-dev: $(VENV)/.ready-demo
	$(call install,dev)

define install
	@echo "Installing fitstep[$(1)] into $(VENV)"
	@echo $$PPID > $(UNFINISHED)
	@$(BIN)/python $(PIP) --constraint constraints.txt --editable '.[$(1)]'
	@rm $(UNFINISHED) && touch $@
endef

interrupted:
	@process=$$(cat $(UNFINISHED)); if kill -0 "$$process" 2>/dev/null; then \
	  echo "Another make (process $$process) is installing into $(VENV). Try again after it." >&2; \
	  exit 1; fi

# --- every source of data -----------------------------------------------------------------------
# An environment of its own, since torch and TensorFlow are large. A stamp that is missing means that
# nothing, or not all, has been installed.

$(SOURCES)/.ready: pyproject.toml constraints.txt
	$(check-python)
	@echo "Installing fitstep[sources] into $(SOURCES), which takes minutes"
	@[ -e $@ ] || { rm -rf $(SOURCES) && $(PYTHON) -m venv $(SOURCES); }
	@rm -f $@
	@$(SOURCES)/bin/python $(PIP) --constraint constraints.txt --editable '.[sources]'
	@touch $@

# --- the newest of everything -------------------------------------------------------------------
# No constraints here, and every run upgrades. The nightly build of Keras is a distribution of
# another name that provides the same package: fitstep's requirements are installed by name, without
# Keras, then fitstep itself without any.

NIGHTLY_REQUIREMENTS := import tomllib; \
project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = project["optional-dependencies"]; \
names = project["dependencies"] + extras["demo"] + extras["test"]; \
print("keras-nightly", *[n for n in names if not n.startswith(("keras", "fitstep"))], sep="\n")

define VERSIONS
import platform
from importlib.metadata import distributions
found = {d.name: d.version for d in distributions()}
names = ["keras", "keras-nightly", "jax", "numpy", "pandas", "scipy", "polars", "pyarrow"]
names += ["datasets", "grain", "torch", "tensorflow_cpu", "tensorflow"]
parts = [f"{n} {found[n]}" for n in names if n in found]
print("Python", ", ".join([platform.python_version(), *parts]))
endef
export VERSIONS

# pyenv's shims are on PATH for versions that they refuse to start, so each candidate is tried.
matrix:
	@newest=$$(for minor in 14 13 12; do \
	    for python in "$$(command -v python3.$$minor)" \
	        "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.$$minor.*/bin/python3; do \
	      if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then echo "$$python"; exit; fi; \
	    done; done); \
	[ -n "$$newest" ] || { echo "make matrix needs Python 3.12 or newer." >&2; exit 1; }; \
	stable=.venv-matrix-$$("$$newest" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	nightly=.venv-nightly; \
	failed=0; summary=""; \
	for folder in $$stable $$nightly; do \
	  echo "== $$folder"; \
	  if [ ! -e $$folder/.ready ]; then rm -rf $$folder; "$$newest" -m venv $$folder || exit 1; fi; \
	  rm -f $$folder/.ready; \
	  upgrade="$$folder/bin/python $(PIP) --upgrade --upgrade-strategy eager"; \
	  if [ $$folder = $$nightly ]; then \
	    $$folder/bin/python -c '$(NIGHTLY_REQUIREMENTS)' > $$folder/requirements.txt && \
	    $$upgrade --requirement $$folder/requirements.txt && \
	    $$upgrade --no-deps --editable .; \
	  else \
	    $$upgrade --editable '.[test]'; \
	  fi || { echo "== $$folder: not installed" >&2; exit 1; }; \
	  touch $$folder/.ready; \
	  if $$folder/bin/python -m pytest $(ARGS); then outcome=passed; \
	  else outcome=FAILED; failed=1; fi; \
	  summary="$$summary$$outcome  $$folder: $$($$folder/bin/python -c "$$VERSIONS")\n"; \
	done; \
	echo "== make matrix"; printf "$$summary"; exit $$failed
