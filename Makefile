# Every target sets up what it needs in .venv; nothing but Python >= 3.11 and make is assumed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# make test-gpu RUN=python3: with an interpreter that has what it takes, and nothing is installed.
READY := $(if $(findstring command line,$(origin RUN)),,$(VENV)/ready)

.PHONY: help train test test-fast package test-gpu test-slurm soak lint types floors docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# torch first, at its pinned version: a looser request would fetch another build.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lightning_wlb needs Python >= 3.11; pass one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) (about a minute) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install -q -c constraints.txt torch
	@$(RUN) -m pip install -q -c constraints.txt -e '.[test]'
	@touch $@

train: $(VENV)/ready  ## train a small decoder with three packings in turn, and compare (under 4 minutes)
	@$(RUN) examples/train_stdlib.py

# Two files at a time, in the order of tests/conftest.py: a test of many ranks waits much, and the
# others are single processes. Bytecode is kept: else each of some hundred processes compiles anew.
test: $(VENV)/ready  ## run the tests (CPU only, about 6 minutes on two cores)
	@PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-fast: $(VENV)/ready  ## run the tests that need no second process (about 90 s on two cores)
	@$(RUN) -m pytest -n 2 -m 'not processes and not families and not slurm and not soak'

# A wheel that lacks a file works in a checkout and nowhere else.
package: $(VENV)/ready  ## build the wheel, install it in a fresh environment and plan with it
	@rm -rf build dist .package && $(RUN) -m build -q --wheel .
	@$(PYTHON) -m venv .package
	@.package/bin/python -m pip install -q -c constraints.txt dist/*.whl
	@cd .package && bin/lightning-wlb plan --lengths generator-a --model 7b --mesh 1,4,2,8 \
	  --context-window 131072 --profile h100 --steps 2
	@rm -rf .package build

test-gpu: $(READY)  ## run the tests that need a CUDA device; RUN=python3: with that as it is
	@$(RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "torch of $(RUN) is missing or sees no CUDA device, and every test would be skipped"; exit 1; }
	@$(RUN) -m pytest -m gpu $$(grep -rl --include='test_*.py' mark.gpu tests)

# Debian: apt-get install slurm-wlm munge
test-slurm: $(VENV)/ready  ## run the tests that start a Slurm of two virtual nodes (where it is installed)
	@$(RUN) -m pytest -m slurm tests/slurm

soak: $(VENV)/ready  ## break real runs from outside (an hour on two cores); PART=faults: one file
	@$(RUN) -m pytest $(if $(PART),-m soak tests/soak/test_$(PART).py,-m 'soak or slurm' tests/soak tests/slurm tests/launchers)

lint: $(VENV)/ready  ## ruff: lint and format
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

types: $(VENV)/ready  ## mypy: strict for the planning half
	@$(VENV)/bin/mypy

floors: $(VENV)/ready  ## import-linter: a room imports only from floors below it
	@$(VENV)/bin/lint-imports

$(VENV)/docs-ready: $(VENV)/ready
	@$(RUN) -m pip install -q -c constraints.txt -e '.[docs]'
	@touch $@

# All pages anew: a warning of a page that is not written again would be lost.
docs: $(VENV)/docs-ready  ## the documentation as a site; broken links and references are errors
	@rm -rf docs/modules
	@$(VENV)/bin/sphinx-build -q -E -a -W --keep-going -c docs -b html . site
	@echo "site/docs/index.html"

clean:  ## remove the environment and caches
	@rm -rf $(VENV) site docs/modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
