# Every target works on a fresh clone as the first and only command: each installs what it needs, once.
#
# Where: an active virtual environment if there is one, else .venv, made with python3. `make PYTHON=/path/to/python`
# uses that interpreter as it is. The versions are those in constraints.txt, torch included; `make CONSTRAINTS=`
# takes whatever pyproject.toml's ranges allow and leaves a torch that is already there.

CONSTRAINTS ?= constraints.txt
JOBS ?= 2

ifdef PYTHON
  PY := $(PYTHON)
else ifdef VIRTUAL_ENV
  PY := $(VIRTUAL_ENV)/bin/python
else
  PY := .venv/bin/python
endif

# The stamp lies beside the packages that it stands for, or, for a foreign environment, carries its name.
ifeq ($(PY),.venv/bin/python)
  STAMP := .venv/flamia-installed
else
  STAMP := build/installed$(subst /,-,$(PY))
endif

PIP := $(PY) -m pip --disable-pip-version-check --no-input install -qq
PYTEST := $(PY) -m pytest -n $(JOBS) --dist worksteal

.PHONY: help install demo test matrix check lint types format docs-figures clean

help:
	@echo "make demo    doctor, accuracy, causality audit and a short training run, ending in one HTML report"
	@echo "make check   before a commit: lint, types, tests that are neither slow nor matrix (minutes)"
	@echo "make test    the test suite without a GPU, all but matrix (JOBS=$(JOBS) processes, about ten minutes)"
	@echo "make matrix  what make test leaves out: every shape and option of the device kernels, foreign kernels,"
	@echo "             drawn inputs and full sizes (half an hour or more)"
	@echo "make lint    ruff check, ruff format --check, mypy"
	@echo "make format  put the sources into the shape that lint asks for"
	@echo "make install only the installation, into $(dir $(PY))"

install: $(STAMP)

# torch comes first and alone, from its exact version, so that pip never trades a CPU build for a CUDA one
# of several gigabytes while it resolves the rest.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@[ "$(PY)" != .venv/bin/python ] || [ -x $(PY) ] || python3 -m venv .venv
	@echo "Installing flamia[dev] for $(PY) (a few minutes the first time)"
	@$(if $(CONSTRAINTS),$(PIP) "$$(grep '^torch==' $(CONSTRAINTS))")
	@$(PIP) $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[dev]'
	@mkdir -p $(dir $@) && touch $@

demo: $(STAMP)
	@$(PY) -m flamia demo

test: $(STAMP)
	@$(PYTEST) -m "not matrix"

check: lint
	@$(PYTEST) -m "not slow and not matrix"

matrix: $(STAMP)
	@$(PYTEST) -m matrix

lint: types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

types: $(STAMP)
	@$(PY) -m mypy

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs-figures: $(STAMP)
	@$(PY) docs/figures/all.py

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
