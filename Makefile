# `make train` and `make test` need Python 3.11 or later and nothing else: they make their own environment in .venv.
PYTHON ?= python3
VENV := .venv
RUN := JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python

.PHONY: train test test-all clean

train: $(VENV)/installed
	$(RUN) -m experiments.train --config=configs/dates.py:bahdanau2015 --workdir=runs/dates
	$(RUN) -m experiments.inspect_attention --workdir=runs/dates

test: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(RUN) -m pytest -n 2 --dist=loadfile

# With the rest of the sweep over score x alignment x cell, and compiled as for any user (tests/conftest.py).
test-all: $(VENV)/installed
	XLA_FLAGS=' ' $(RUN) -m pytest -n 2 --dist=loadfile -m 'product or not product'

$(VENV)/installed: requirements.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed; make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
