# make setup   everything the project needs, in .venv
# make demo    images -> shards -> ZeRO pre-training -> accuracy, on data that needs no download
# make test    the checks of every change; make test-all adds the full matrices
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test test-all lint clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt cluster/setup.sh vitscale/data/view.c
	@PYTHON="$(PYTHON)" bash cluster/setup.sh .venv
	@touch $@

demo: $(READY)
	@$(BIN)/vitscale demo

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest -m "not slow"

test-all: lint
	@$(BIN)/python -m pytest

clean:
	rm -rf .venv build dist *.egg-info
