# make setup   everything the project needs, in .venv
# make demo    images -> shards -> ZeRO pre-training -> accuracy, on data that needs no download
# make test    the checks of every change, JOBS files of tests at a time; make test-all adds the full matrices
# make test-cluster   runs over two hosts and under a real Slurm, on this machine; root, installs what they need (apt)
# make chaos   half an hour of random faults, compared to the last bit with the same run left in peace
SHELL := /bin/bash
PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test test-all test-cluster chaos lint clean

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
	@$(BIN)/python -m pytest -m "not slow" --numprocesses $(JOBS) --dist loadfile

test-all: lint
	@$(BIN)/python -m pytest

test-cluster: $(READY)
	@bash tests/cluster/setup.sh
	@$(BIN)/python -m pytest -m cluster tests/cluster

chaos: $(READY)
	@out=$$(mktemp -d) && echo "logs in $$out" && \
		$(BIN)/python tests/faults/chaos.py --minutes $(or $(MINUTES),30) --seed $(or $(SEED),0) --out $$out

clean:
	rm -rf .venv build dist *.egg-info
