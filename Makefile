# Every target makes its own set-up in .venv first; that is quick when nothing changed.
.PHONY: demo test lint bench setup help
.DEFAULT_GOAL := help

PY := .venv/bin/python

help:  ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /	/' | expand -t 10

setup:  ## .venv with the CPU engine and this project
	@PYTHON="$(PYTHON)" bash scripts/setup_cpu.sh

demo: setup  ## a server learns its own draft while it is idle; about 15 minutes on 2 cores
	@exec $(PY) -m vllm_specdraft.cli demo

test: setup  ## all tests; those that start a real engine take most of the time
	@$(PY) -m pytest --durations=25

lint: setup  ## ruff and mypy
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && $(PY) -m mypy

bench: setup  ## the rollout benchmark: one JSON line
	@$(PY) -m benchmarks.rollout --json
