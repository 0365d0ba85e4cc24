# make demo       from a fresh clone to a fine-tuned, merged, 4-bit, served model that answers
# make test       everything CI checks
# What .venv was made for; an environment for a GPU stays one until ACCEL says otherwise.
ACCEL ?= $(or $(shell cat .venv/.accel 2>/dev/null),cpu)
PY := .venv/bin/python
export TUNESERVE_HOME ?= $(CURDIR)/.tuneserve
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1

.PHONY: help venv demo down check test test-full clean

help:
	@grep -E '^# make' Makefile | sed 's/^# //'
	@echo "make venv       install only (ACCEL=cuda for a GPU machine)"
	@echo "make down       stop what make demo started"
	@echo "make check      linter, formatter, type checker"
	@echo "make test-full  the long tests as well: kill loops, switches under load"

venv:
	@deploy/venv.sh $(ACCEL)

demo: venv
	@$(PY) deploy/demo.py

down:
	@$(PY) -m tuneserve down

check: venv
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check -q . || { echo "run: .venv/bin/ruff format ."; exit 1; }
	@.venv/bin/mypy

test: check
	@$(PY) -m pytest -m "not full" --durations=15 --ignore=tests/gpu

test-full: check
	@$(PY) -m pytest --durations=30 --ignore=tests/gpu  # tests/gpu needs a GPU: python -m pytest tests/gpu

clean:
	rm -rf .tuneserve .pytest_cache .ruff_cache .mypy_cache build *.egg-info
