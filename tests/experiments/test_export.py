"""experiments.export: the files of an exported run work without this package."""

import subprocess
import sys

import numpy as np
import pytest

from attention_jax.decoding.compiled_search import BeamSearch, compile_search
from attention_jax.decoding.constraints import Constraints
from attention_jax.decoding.exporting import ExportRequest, export_decoder
from attention_jax.decoding.ranking import DEFAULT_RANKING
from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import ModelConfig, build
from attention_jax.modules.attention import Attention
from attention_jax.modules.parameter_files import flatten_names
from attention_jax.systems.runs import open_run
from attention_jax.systems.translation.system import initial_params
from tests.experiments.helpers import ROOT, run
from tests.experiments.test_bad_input import assert_user_error

LINES = ['a b', 'c', 'b c a']
LOADER = ROOT / 'docs' / 'load_decoder.py'
# Runs the loader in a process that cannot import this package.
RUN_ELSEWHERE = """
import runpy, sys
sys.modules['attention_jax'] = None  # importing it raises ImportError
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_an_exported_run_translates_without_this_package(trained, tmp_path):
  pytest.importorskip('flatbuffers')  # of the extra `interop`
  folder, _ = trained
  output = tmp_path / 'exported'
  result = run('export', f'--workdir={folder}', f'--output={output}')
  assert result.code == 0, result.err
  names = 'search.jax_export start.jax_export step.jax_export vocabulary.source.json vocabulary.target.json'
  assert sorted(path.name for path in output.iterdir()) == [*names.split(), 'weights.safetensors']
  command = [sys.executable, '-c', RUN_ELSEWHERE, LOADER, output, *LINES]
  elsewhere = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert elsewhere.returncode == 0, elsewhere.stderr
  texts, scores, greedy_texts = zip(*(line.split('\t') for line in elsewhere.stdout.splitlines()), strict=True)
  opened = open_run(folder)
  translations = opened.translate(LINES)
  assert list(texts) == [translation.text for translation in translations]
  assert [*map(float, scores)] == pytest.approx([translation.score for translation in translations], abs=1e-5)
  assert list(greedy_texts) == [translation.text for translation in opened.translate(LINES, beams=1)]


@pytest.mark.long
@pytest.mark.parametrize(
  ('encoder', 'alignment', 'source_length'),
  [
    ('act(features=4)', 'softmax', 0),
    ('embedded', 'latent_monotonic', 3),
    pytest.param('lstmn(features=4)', 'softmax', 3, marks=pytest.mark.long),
  ],
)
def test_exports_of_recurrent_models_find_the_hypotheses_of_the_model(encoder, alignment, source_length):
  attention = Attention(alignment=alignment, features=4)
  model = build(ModelConfig(encoder, 'luong(rnn="simple", features=4)', embedding=4, attention=attention), 7, 7)
  params = initial_params(model, 0)
  constraints = Constraints(no_repeat_ngram_size=1, min_length=2)
  request = ExportRequest(4, 2, DEFAULT_RANKING, constraints=constraints)
  if source_length:
    with pytest.raises(UserError, match='needs a fixed number of source positions; set source_length'):
      export_decoder(model, params, request)
  exported = export_decoder(model, params, request._replace(source_length=source_length))
  source = np.array([[4, 5, 2], [6, 2, 0]], np.int32)
  hypotheses = exported['search'].call(flatten_names(params), source, source != 0)
  search = compile_search(model, BeamSearch(2), 4, DEFAULT_RANKING, constraints=constraints)
  expected = search(params, source, source != 0)
  np.testing.assert_array_equal(hypotheses['tokens'], expected.tokens)
  np.testing.assert_allclose(hypotheses['scores'], expected.scores, atol=1e-5)


def test_mistakes_are_reported_in_one_line(trained, tmp_path):
  messages = {'gpu': "unknown platform 'gpu'", '': '--platforms is empty; expected any of: cpu, '}
  for platforms, message in messages.items():
    result = run('export', f'--workdir={trained[0]}', f'--output={tmp_path}/a', f'--platforms={platforms}')
    assert_user_error(result, [f'error: {message}'])


@pytest.mark.long
@pytest.mark.parametrize('module', ['flatbuffers', 'safetensors'])
def test_nothing_is_written_without_the_packages_of_exports(module, trained, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
  result = run('export', f'--workdir={trained[0]}', f'--output={tmp_path}/exported')
  assert_user_error(result, [f"exports need the package {module}; pip install 'attention_jax[interop]'"])
  assert not list(tmp_path.iterdir())
