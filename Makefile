# `make train` and `make test` need Python 3.11 or later and nothing else: they make their own environment in .venv.
PYTHON ?= python3
VENV := .venv
# The tests start many processes, which load the modules that the first one has compiled.
unexport PYTHONDONTWRITEBYTECODE
RUN := JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python

.PHONY: train models test test-all docs chaos accelerator clean

train: $(VENV)/installed
	$(RUN) -m experiments.train --config=configs/dates.py:bahdanau2015_deep_tanh --workdir=runs/dates
	$(RUN) -m experiments.inspect_attention --workdir=runs/dates

# Ready-made models, opened by --workdir=@dates and @shapes; NETTALK=FOLDER adds @nettalk (FOLDER has its data).
models: $(VENV)/installed
	$(RUN) -m experiments.models $(if $(NETTALK),--folder=$(NETTALK))

test: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m pytest -n 2 --dist=loadfile

# Every test: the whole sweep over score x alignment x cell, the long tests, the packages; with XLA's default
# optimisations and the annotations of every call enforced (see tests/conftest.py).
test-all: $(VENV)/installed
	ENFORCE_ANNOTATIONS=1 XLA_FLAGS=' ' $(RUN) -m pytest -n 2 --dist=loadfile -m "long or not long"

# CASES hostile inputs (tests/fuzz.py), then KILLS kills of training at random moments (tests/experiments/chaos.py).
CASES := 2000
KILLS := 200
chaos: $(VENV)/installed
	$(RUN) -m tests.fuzz $(CASES)
	$(RUN) -m tests.experiments.chaos $(KILLS)

# The documentation site in site/, whose pages open from disk; for its search field: python -m http.server -d site
# It shows what @dates attends to, which is trained first (five minutes) unless it exists, and @nettalk and @shapes if they
# exist.
docs: $(VENV)/installed
	$(RUN) -m experiments.models --names=dates
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo 'written to site/index.html'

# For a machine with an accelerator, all in bfloat16: attention and its growth, updates, search, several seeds, then
# training on Multi30k. make accelerator DATA=FOLDER [JAX=tpu]; DATA is what config.data.folder of multi30k is, JAX the
# extra of jax that installs what the device needs. Fails if there is no such device.
JAX := cuda13
ON_DEVICE = JAX_PLATFORMS=$(if $(filter tpu,$(JAX)),tpu,cuda) $(VENV)/bin/python
accelerator: $(VENV)/installed
	$(if $(wildcard $(DATA)/train.en),,$(error make accelerator needs DATA=FOLDER with train.en, see configs/multi30k.py))
	$(VENV)/bin/pip install --quiet "jax[$(JAX)]==$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)')"
	$(ON_DEVICE) -m experiments.benchmark --dtype=bfloat16 --repeats=3 --out=runs/accelerator \
	  --suites=limits,kernel_agreement,kernels,growth,training,decoding,seeds,pipeline; failed=$$?; \
	$(ON_DEVICE) -m experiments.train --config=configs/multi30k.py:bahdanau2015_deep_tanh --config.model.dtype=bfloat16 \
	  --config.data.folder=$(DATA) --workdir=runs/accelerator/multi30k && exit $$failed

$(VENV)/installed: requirements.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed; make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
