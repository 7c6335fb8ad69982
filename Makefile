# `make train` and `make test` need only Python 3.11 or later: they create the environment .venv (requirements.txt), to which
# the tests and the documentation add requirements-dev.txt.
PYTHON ?= python3
VENV := .venv
# The tests start many processes, which load the bytecode that the first one has written.
unexport PYTHONDONTWRITEBYTECODE
# On CPUs, large arrays in large pages make an update up to 1.19 times as fast (docs/scaling.md).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
RUN := JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/python

.PHONY: train models test test-all docs chaos accelerator clean

train: $(VENV)/installed
	$(RUN) -m experiments.train --config=configs/dates.py:bahdanau2015_deep_tanh --workdir=runs/dates
	$(RUN) -m experiments.inspect_attention --workdir=runs/dates

# Trains the models that --workdir=@dates and @shapes open; NETTALK=FOLDER, the folder of its data, adds @nettalk.
models: $(VENV)/installed
	$(RUN) -m experiments.models $(if $(NETTALK),--folder=$(NETTALK))

test: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m pytest -n 2 --dist=loadfile

# Every test, including the whole sweep over score x alignment x cell, the long tests and those of packaging, with XLA's
# default optimisations and with annotations checked in every call (see tests/conftest.py). The references of
# transformers are made anew.
test-all: $(VENV)/installed-dev $(VENV)/libtpu $(VENV)/references
	ENFORCE_ANNOTATIONS=1 XLA_FLAGS=' ' $(RUN) -m pytest -n 2 --dist=loadfile -m "long or not long"

# The compiler of TPUs, beside the other packages: jax would look for a TPU in every process.
$(VENV)/libtpu: lab/requirements.txt | $(VENV)/installed-dev
	$(VENV)/bin/pip install --quiet --target $@ $$(grep '^libtpu' lab/requirements.txt)

# An environment of its own for tests/references/make_pretrained.py, with torch and transformers.
$(VENV)/references: lab/requirements.txt | $(VENV)/installed-dev
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet $$(grep -h '^torch\|^transformers\|^sentencepiece' lab/requirements.txt requirements.txt)

# Tests CASES hostile inputs (tests/fuzz.py), then kills training KILLS times at random moments
# (tests/experiments/chaos.py).
CASES := 2000
KILLS := 200
chaos: $(VENV)/installed-dev
	$(RUN) -m tests.fuzz $(CASES)
	$(RUN) -m tests.experiments.chaos $(KILLS)

# The documentation site in site/, whose pages open from disk; its search field needs a server, such as
# python -m http.server -d site. The site shows the attention of the run of `make train`, without which @dates is trained
# first (five minutes) unless it exists, and of @shapes if it exists.
docs: $(VENV)/installed-dev
	$(if $(wildcard runs/dates/results.json),,$(RUN) -m experiments.models --names=dates)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo 'written to site/index.html'

# For a machine with an accelerator, in bfloat16: benchmarks of attention and its growth, updates, search, several seeds
# and the input pipeline, then training on Multi30k. make accelerator DATA=FOLDER [JAX=tpu]; DATA is config.data.folder
# of multi30k, JAX the extra of jax for the device. Fails if there is no such device.
JAX := cuda13
ON_DEVICE = JAX_PLATFORMS=$(if $(filter tpu,$(JAX)),tpu,cuda) $(VENV)/bin/python
accelerator: $(VENV)/installed
	$(if $(wildcard $(DATA)/train.en),,$(error make accelerator needs DATA=FOLDER with train.en, see configs/multi30k.py))
	$(VENV)/bin/pip install --quiet "jax[$(JAX)]==$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)')"
	$(ON_DEVICE) -m lab.benchmark --dtype=bfloat16 --repeats=3 \
	  --suites=limits,kernel_agreement,kernels,growth,training,decoding,seeds,pipeline; failed=$$?; \
	$(ON_DEVICE) -m experiments.train --config=configs/multi30k.py:bahdanau2015_deep_tanh --config.model.dtype=bfloat16 \
	  --config.data.folder=$(DATA) --workdir=runs/accelerator/multi30k && exit $$failed

$(VENV)/installed: requirements.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or later is needed; make PYTHON=python3.12"'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet -r requirements.txt
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(VENV)/bin/pip install --quiet -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info
