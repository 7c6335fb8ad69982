"""Imported models of transformers return the answers that tests/references/make_pretrained.py stored."""

import dataclasses
import itertools
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data import vocab
from attention_jax.decoding.compiled_search import compile_beam_search
from attention_jax.decoding.ranking import Ranking
from attention_jax.errors import UserError
from attention_jax.modules.attention import Attention
from attention_jax.modules.parameter_files import read_arrays, read_metadata, save_weights
from attention_jax.systems.runs import open_run
from attention_jax.systems.translation.pretrained import ARCHITECTURES, SHARED, import_model, read_pretrained
from attention_jax.systems.translation.system import TranslationSystem
from attention_jax.tokens import EOS, PAD
from tests.references import make_tokenizers

ROOT = Path(__file__).parents[3]
REFERENCES = ROOT / 'tests/references/pretrained'
PYTHON = ROOT / '.venv/references/bin/python'
MODELS = ['marian', 'bart', 'mbart', 't5', 't5_gated']
UNKNOWN = {'marian': 1, 'bart': 3, 'mbart': 3, 't5': 2, 't5_gated': 2, 'bert': 10}
SPECIAL = {'pad_token_id': 0, 'decoder_start_token_id': 11, 'eos_token_id': 12}  # those of BERT
MAX_LENGTH = 24  # as in make_pretrained.py
CLOSE = {'rtol': 1e-5, 'atol': 1e-5}


def stub_tokenizers(folder: Path, name: str):
  """Returns a function in place of vocab.from_pretrained, for a folder without the files of a tokenizer."""
  config = json.loads((folder / 'config.json').read_text())
  size = config['vocab_size']
  first = [id if config.get(field) is None else config[field] for field, id in SPECIAL.items()]
  first.append(UNKNOWN[name])
  rows = np.array(first + [row for row in range(size) if row not in first], np.int32)
  vocabulary = vocab.ListedVocabulary('word', [f'w{row}' for row in rows[len(first) :]])
  return lambda path: (vocabulary, vocabulary, rows)


def load(name: str, folder: Path, monkeypatch, references: Path = REFERENCES):
  """Returns an imported model, its answers with ids of this package, and the row of each id."""
  shutil.copytree(references / name, folder)
  for file in ARCHITECTURES[json.loads((folder / 'config.json').read_text())['model_type']].tokenizers:
    (folder / file).write_bytes(b'')
  from_pretrained = stub_tokenizers(folder, name)
  monkeypatch.setattr(vocab, 'from_pretrained', from_pretrained)
  *_, rows = from_pretrained(folder)
  pretrained = read_pretrained(str(folder))
  ids = np.zeros(rows.max() + 1, np.int32)
  ids[rows[::-1]] = np.arange(len(rows))[::-1]  # a row with several ids has the first of them: PAD, or EOS
  ids[rows[EOS]] = EOS
  answers = read_arrays(folder / 'answers.safetensors')
  ids_of = {
    key: ids[answers[key]] for key in answers if key not in ('mask', 'logits', 'memory') and 'scores' not in key
  }
  return pretrained, answers | ids_of, rows


def test_answers_name_their_versions():
  for path in REFERENCES.glob('*/answers.safetensors'):
    metadata = read_metadata(path)
    assert metadata['torch'].startswith('2.13.0') and metadata['transformers'] == '5.24.0', path


@pytest.mark.parametrize('name', MODELS)
def test_logits_equal_those_of_transformers(name, tmp_path, monkeypatch):
  check_logits(*load(name, tmp_path / name, monkeypatch))


def check_logits(pretrained, answers, rows):
  """Checks the logits of all steps at once, and those of one step after the other."""
  model, params = pretrained.system.model, pretrained.params

  @jax.jit
  def run(params, source, mask, target):
    outputs = model.apply({'params': params}, source, mask, target)
    carry, memory = model.apply({'params': params}, source, mask, target.shape[1], method='start')
    inputs = jnp.concatenate([jnp.ones_like(target[:, :1]), target[:, :-1]], 1)

    def step(carry, token):
      carry, step = model.apply({'params': params}, carry, token, memory, method='step')
      return carry, step.logits

    return outputs.logits, jnp.swapaxes(jax.lax.scan(step, carry, inputs.T)[1], 0, 1)

  logits, stepped = run(params, answers['source'], answers['mask'], answers['target'])
  is_copy = np.array([np.count_nonzero(rows == row) > 1 for row in rows]) & (np.arange(len(rows)) == 1)
  np.testing.assert_allclose(logits[..., ~is_copy], answers['logits'][..., rows[~is_copy]], **CLOSE)
  assert np.all(jax.nn.softmax(logits)[..., is_copy] == 0)
  np.testing.assert_allclose(stepped, logits, **CLOSE)


SEARCHES = {'greedy': (1, 1.0), 'beam_1': (4, 1.0), 'beam_06': (4, 0.6)}  # beams, length_penalty
QUICK = [('marian', 'beam_06'), ('t5', 'greedy')]
CASES = [case for case in itertools.product(MODELS, SEARCHES) if case not in QUICK]


@pytest.mark.parametrize(('name', 'search'), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in CASES)])
def test_searches_equal_generate(name, search, tmp_path, monkeypatch):
  """Beam search equals generate(early_stopping='never') token by token."""
  check_search(search, *load(name, tmp_path / name, monkeypatch))


def check_search(search, pretrained, answers, rows):
  beams, alpha = SEARCHES[search]
  run = compile_beam_search(pretrained.system.model, beams, MAX_LENGTH, Ranking(alpha, length_penalty='power'))
  found = run(pretrained.params, answers['source'], answers['mask'])
  expected = answers[search][:, 1:]
  expected = np.where(np.cumsum(np.cumsum(expected == EOS, 1), 1) > 1, PAD, expected)  # nothing after EOS
  tokens = np.asarray(found.tokens).reshape(len(expected), -1)
  np.testing.assert_array_equal(tokens[:, : expected.shape[1]], expected)
  assert np.all(tokens[:, expected.shape[1] :] == PAD)
  if beams > 1:
    np.testing.assert_allclose(found.scores.reshape(-1), answers[search.replace('beam', 'scores')], **CLOSE)


def test_the_encoder_of_bert_equals_that_of_transformers(tmp_path, monkeypatch):
  pretrained, answers, _ = load('bert', tmp_path / 'bert', monkeypatch)

  @jax.jit
  def encode(params, source, mask):
    return pretrained.system.model.apply(
      {'params': params}, source, mask, method=lambda model, *x: model.encoder(*x, True)
    )

  memory = encode(pretrained.params, answers['source'], answers['mask']).memory
  mask = answers['mask']
  np.testing.assert_allclose(memory[mask], answers['memory'][mask], **CLOSE)


WRONG = [
  ('t5_gated', {'tie_word_embeddings': True}, 'must be false for weights with an lm_head.weight'),
  ('bert', {'hidden_act': 'tanh'}, "config.json: unknown activation of a pretrained model: 'tanh'"),
  ('bart', {'max_position_embeddings': 30}, r'positions.table must be \[30, 16\], got \[40, 16\]'),
  ('mbart', {'vocab_size': 70}, 'shared.weight must have vocab_size rows, got 61'),
  ('marian', {'length_penalty': -1.0}, 'config.evaluation.alpha must be at least 0'),
]


@pytest.mark.parametrize(('name', 'fields', 'message'), WRONG)
def test_a_config_that_does_not_fit_is_reported(name, fields, message, tmp_path, monkeypatch):
  path = shutil.copytree(REFERENCES / name, tmp_path / 'references' / name) / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | fields))
  with pytest.raises(UserError, match=message):
    load(name, tmp_path / name, monkeypatch, tmp_path / 'references')


@pytest.fixture(scope='module')
def made_anew(tmp_path_factory):
  """Models and answers of the installed transformers; `make test-all` makes the environment."""
  if not PYTHON.exists():
    pytest.skip(f'needs {PYTHON}: make test-all')
  folder = tmp_path_factory.mktemp('references')
  subprocess.run([PYTHON, ROOT / 'tests/references/make_pretrained.py', folder], check=True, timeout=1200)
  return folder


@pytest.mark.long
@pytest.mark.parametrize('name', MODELS)
def test_references_made_anew_agree(name, made_anew, tmp_path, monkeypatch):
  loaded = load(name, tmp_path / name, monkeypatch, made_anew)
  check_logits(*loaded)
  for search in SEARCHES:
    check_search(search, *loaded)


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
  """Folders of tokenizers as `transformers` stores them."""
  folder = tmp_path_factory.mktemp('tokenizers')
  with tarfile.open(make_tokenizers.ARCHIVE) as archive:
    archive.extractall(folder, filter='data')
  return folder


@pytest.mark.long
@pytest.mark.parametrize('name', ARCHITECTURES)
def test_weights_and_a_tokenizer_become_a_run(name, tokenizers, tmp_path):
  folder = tmp_path / 'model'
  shutil.copytree(tokenizers / name, folder)
  config = json.loads((REFERENCES / name / 'config.json').read_text())
  changed = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(config | changed))
  arrays = read_arrays(REFERENCES / name / 'model.safetensors')
  for key, array in arrays.items():
    shape = tuple(changed['vocab_size'] if size == config['vocab_size'] else size for size in array.shape)
    arrays[key] = np.resize(array, shape)
  save_weights(arrays, folder / 'model.safetensors')
  pretrained = import_model(str(folder), tmp_path / 'run')
  run = open_run(tmp_path / 'run')
  jax.tree.map(np.testing.assert_array_equal, run.params, pretrained.params)
  *_, rows = vocab.from_pretrained(str(folder))
  table = run.params['encoder']['embedding']['table']['embedding']
  source = 'embeddings.word_embeddings.weight' if name == 'bert' else SHARED
  np.testing.assert_array_equal(table, next(array for key, array in arrays.items() if key.endswith(source))[rows])
  assert len(run.vocabularies.source) == len(rows)
  TranslationSystem.check(run.config)
  if name == 'bert':  # any decoder over its encoder
    changes = {'decoder': 'luong', 'output': 'vocabulary', 'attention': Attention('general')}
    model = dataclasses.replace(run.config.model, **changes)
    TranslationSystem.check(dataclasses.replace(run.config, model=model))
