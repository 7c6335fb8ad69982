"""The lesson docs/attention_basics: the script runs, its exercises are checked, and the notebook is the same."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import jupytext
import matplotlib.pyplot as plt
import numpy as np
import pytest

import attention_jax as aj

DOCS = Path(aj.__file__).parent.parent / 'docs'
SCRIPT = DOCS / 'attention_basics.py'
FIGURES = 11  # that the script draws, at least
WRONG_ANSWERS = {
  'scores': [15, 60, 15, 36],
  'masked softmax': lambda scores, mask: np.exp(scores) / np.exp(scores).sum(),
  'symmetric': 'general',
  'temperature': 1.0,
  'parameters of additive': 512 * 64 + 256 * 64,
  'cost': 90,
}


@pytest.fixture(scope='module')
def lesson():
  """The names of the script, run with models that are not trained: claims about trained models are not checked."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('LESSON_STEPS', '0')
    backend = plt.get_backend()
    plt.switch_backend('Agg')
    yield runpy.run_path(str(SCRIPT))
    plt.close('all')
    plt.switch_backend(backend)


@pytest.mark.long
def test_the_script_runs_and_draws(lesson):
  assert len(plt.get_fignums()) >= FIGURES
  assert all(plt.figure(number).axes for number in plt.get_fignums())


@pytest.mark.long
def test_exercises_accept_the_solution_and_reject_a_wrong_or_missing_answer(lesson):
  assert lesson['CHECKS'].keys() == lesson['SOLUTIONS'].keys() == WRONG_ANSWERS.keys()
  for exercise, wrong in WRONG_ANSWERS.items():
    answers = lesson['SOLUTIONS'][exercise], wrong, ...
    assert [bool(lesson['check'](exercise, answer)) for answer in answers] == [True, False, False], exercise


@pytest.mark.long
def test_the_notebook_is_the_script():
  script = jupytext.read(SCRIPT)
  notebook = jupytext.read(DOCS / 'attention_basics.ipynb')
  cells = [[(cell.cell_type, cell.source) for cell in document.cells] for document in (script, notebook)]
  assert cells[0] == cells[1], 'run: cd docs && jupytext --to ipynb --execute attention_basics.py'


def test_the_notebook_was_run_to_its_end():
  cells = [cell for cell in jupytext.read(DOCS / 'attention_basics.ipynb').cells if cell.cell_type == 'code']
  assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
  outputs = [output for cell in cells for output in cell.outputs]
  assert not [output for output in outputs if output.output_type == 'error']
  assert sum('image/png' in output.get('data', {}) for output in outputs) >= FIGURES


@pytest.mark.packaging
def test_claims_about_trained_models_hold():
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  command = [sys.executable, str(SCRIPT)]
  settings = {'MPLBACKEND': 'Agg', 'PYTHONPATH': str(DOCS.parent)}
  subprocess.run(command, env=environment | settings, check=True, timeout=600)
