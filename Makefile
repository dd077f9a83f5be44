# Each target does its own set-up; the second time there is nothing to set up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Four at once, in the order of tests/turns.py. One after the other: make test BESIDE=
BESIDE := -n 4 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-slow schedules schedules-selftest chaos exits lint docs compat bench bench-long gpu reproduce clean

demo: $(STAMP)
	$(BIN)/python -m recipes.train

test: $(STAMP)  # what pytest makes of the files is kept, else each of the four makes it anew
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(BESIDE)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

schedules: $(STAMP)
	$(BIN)/python -m tests.schedules

schedules-selftest: $(STAMP)
	$(BIN)/python -m tests.schedules --selftest

chaos: $(STAMP)
	$(BIN)/python -m tests.cluster.stops
	$(BIN)/python -m tests.cluster.chaos --seed 1 2 3 --minutes 3

exits: $(STAMP)
	$(BIN)/python -m tests.exits

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/vulture
	$(MAKE) docs

docs: $(STAMP)  # the site, in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

compat: $(STAMP)  # wheel and sdist in clean environments, lowest and highest versions: minutes and gigabytes
	$(BIN)/python -m tests.compat

bench: $(STAMP) $(VENV)/.bench
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.running_ahead
	$(BIN)/python -m benchmarks.codecs
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.epoch_end
	$(BIN)/python -m benchmarks.graphs
	$(BIN)/python -m benchmarks.straggler
	$(BIN)/python -m benchmarks.input
	$(BIN)/python -m benchmarks.simulation
	$(BIN)/python -m benchmarks.control_plane
	-$(BIN)/python -m benchmarks.network  # says so where it cannot run

bench-long: $(STAMP)  # hours; what was measured before is kept, so that it can be stopped and goes on
	$(BIN)/python -m benchmarks.time_to_loss

gpu: $(STAMP)  # under eight minutes; without CUDA on an emulated device
	$(BIN)/python -m benchmarks.gpu

reproduce: $(STAMP)
	$(BIN)/python -m benchmarks.reproduction

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[recipes,dev]'
	touch $(STAMP)

$(VENV)/.bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	touch $(VENV)/.bench

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist outputs multirun
