# make demo    install what is needed into .venv, run the main job on this machine
# make test    the tests that need no GPU, about twenty minutes on two cores
# make test-full    also the long ones: every part killed, resumed runs that learn, both backends
# make lint    formatting, lint and types
# Variables: PYTHON=python3.12 (which interpreter), TORCH_INDEX=URL (another package index for torch), VENV=DIR
VENV ?= .venv
PYTHON ?= python3
TORCH_INDEX ?=
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint clean

help:
	@sed -n 's/^# //p' Makefile

$(INSTALLED): requirements/cpu.lock requirements/install.sh pyproject.toml
	@requirements/install.sh "$(VENV)" "$(PYTHON)" "$(TORCH_INDEX)"
	@touch $@

demo: $(INSTALLED)
	@$(VENV)/bin/miles-mooncake train --config configs/local.yaml

lint: $(INSTALLED)
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

test: $(INSTALLED) lint
	@PYTHONWARNINGS="ignore:builtin type:DeprecationWarning" $(VENV)/bin/python -m pytest -n 3 --dist worksteal -m "not slow"

test-full: $(INSTALLED) lint
	@PYTHONWARNINGS="ignore:builtin type:DeprecationWarning" $(VENV)/bin/python -m pytest

clean:
	rm -rf $(VENV) runs
