"""Models whose output layer copies words of the source, including out-of-vocabulary words."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.encoding import encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import word
from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.functional.copying import emittable
from attention_jax.inference.predictor import BeamSearch, Predictor, compile_search
from attention_jax.losses.sequence import cross_entropy
from attention_jax.models.encoder_decoder import build, shift_right
from attention_jax.modules.outputs import OUTPUTS
from attention_jax.systems.config import default_config
from attention_jax.tokens import EOS, UNK
from tests.models.helpers import S, T, build_conv, build_tiny, build_transformer, inputs
from tests.modules.helpers import variables
from tests.sweeps import sample_cases

WORDS = 11
COPYING = [name for name, cls in OUTPUTS.items() if cls.copies]
SIZES = (WORDS, WORDS)
MODELS = {
  'bahdanau': lambda output: build_tiny('bahdanau', 'rnn="gru"', sizes=SIZES, output=output),
  'luong': lambda output: build_tiny('luong', 'rnn="gru"', sizes=SIZES, output=output, heads=2),
  'gnmt': lambda output: build_tiny('gnmt', 'layers=2', sizes=SIZES, output=output),
  'transformer': lambda output: build_transformer(sizes=SIZES, output=output),
  'conv': lambda output: build_conv(sizes=SIZES, output=output),
}


def copying_inputs(seed=0):
  """Returns inputs with out-of-vocabulary words; the first occurrence of the id WORDS + s is at position s."""
  source, mask, target = inputs(seed, sizes=SIZES)
  source = source.at[:, 1].set(WORDS + 1).at[0, 4].set(WORDS + 1)
  return source, mask, target.at[:, 0].set(WORDS + 1)


STEP_CASES = [
  *(('bahdanau', output) for output in (*COPYING, 'pointer_generator(tied=True)')),
  ('luong', 'copynet'),
  ('gnmt', 'pointer_generator'),
  ('transformer', 'copynet'),
  ('conv', 'pointer_generator'),
]


@pytest.mark.parametrize(('decoder', 'output'), STEP_CASES)
def test_steps_equal_the_call(decoder, output):
  model, (source, mask, target) = MODELS[decoder](output), copying_inputs()
  params = variables(model, source, mask, target)
  outputs = jax.jit(model.apply)(params, source, mask, target)
  assert outputs.logits.shape == (*target.shape, WORDS + S) and outputs.linear == ()
  np.testing.assert_allclose(jnp.exp(outputs.logits).sum(-1), np.ones(target.shape), rtol=1e-4)
  carry, memory = model.apply(params, source, mask, T, method='start')
  step = jax.jit(lambda carry, token: model.apply(params, carry, token, memory, method='step'))
  for t, token in enumerate(shift_right(target).T):
    carry, step_outputs = step(carry, token)
    np.testing.assert_allclose(step_outputs.logits, outputs.logits[:, t], rtol=2e-4, atol=2e-4)


def test_pointer_probabilities_are_sums_of_weights():
  model, (source, mask, target) = MODELS['bahdanau']('pointer'), copying_inputs()
  params = variables(model, source, mask, target)
  outputs = jax.jit(model.apply)(params, source, mask, target)
  source, mask = np.asarray(source), np.asarray(mask)
  for b in range(len(source)):
    for token in set(source[b][mask[b]].tolist()):
      expected = np.asarray(outputs.weights[b])[:, (source[b] == token) & mask[b]].sum(-1)
      np.testing.assert_allclose(jnp.exp(outputs.logits[b, :, token]), expected, rtol=1e-4)


@pytest.mark.parametrize(('decoder', 'output'), list(itertools.product(MODELS, COPYING)))
def test_every_decoder_supports_every_copying_output(decoder, output):
  model, (source, mask, target) = MODELS[decoder](output), copying_inputs()
  compute_outputs = lambda *args: model.init_with_output(jax.random.key(0), *args)[0]
  assert jax.eval_shape(compute_outputs, source, mask, target).logits.shape == (*target.shape, WORDS + S)


@pytest.mark.parametrize('output', COPYING)
def test_encoders_replace_unknown_words_by_unk_and_padding_has_no_effect(output):
  model, (source, mask, target) = MODELS['bahdanau'](output), copying_inputs()
  params = variables(model, source, mask, target)
  run = jax.jit(model.apply)
  outputs = run(params, source, mask, target)
  other_padding = run(params, jnp.where(mask, source, WORDS + 2), mask, target)
  np.testing.assert_allclose(other_padding.logits, outputs.logits, atol=1e-5)
  with_unk = jnp.where(source >= WORDS, UNK, source)
  np.testing.assert_allclose(run(params, with_unk, mask, target).weights, outputs.weights, atol=1e-6)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'sizes': (11, 13)}, 'copies, which requires a shared vocabulary, got 11 and 13 tokens'),
    ({'cell': 'plain'}, 'copies, which requires attention weights, but this decoder attends to nothing'),
    ({'alignment': 'latent'}, 'copies, which latent alignments do not support; .* an output of: vocabulary, tied'),
    ({'output': 'pointer(tied=True)'}, "unknown option of output 'pointer': 'tied'"),
  ],
)
def test_user_errors(fields, message):
  with pytest.raises(UserError, match=message):
    build_tiny(**{'sizes': SIZES, 'output': 'pointer', **fields})


def test_ids_of_unknown_words_are_their_first_positions():
  vocabulary = word(['a b c'])  # ids 4, 5, 6
  corpus = Corpus(['a Oslo b Oslo Rom', 'c c'], ['Rom a Oslo Bern', 'a Oslo'])
  encoded = encode(corpus, vocabulary, vocabulary)
  size = len(vocabulary)
  assert encoded.source.tolist() == [4, size + 1, 5, size + 1, size + 4, EOS, 6, 6, EOS]
  assert encoded.target.tolist() == [size + 4, 4, size + 1, UNK, EOS, 4, UNK, EOS]
  assert vocabulary.decode([size + 4, 4, size + 1, UNK, EOS], corpus.source[0].split()) == 'Rom a Oslo <unk>'


@pytest.mark.parametrize('beams', [1, 3])
def test_predictions_contain_unknown_words_in_their_spelling(beams):
  vocabulary = word(['a b c'])
  fields = {'encoder': 'birnn(features=6)', 'decoder': 'bahdanau(features=5, readout=4)', 'output': 'pointer'}
  config = default_config().model.to_dict() | fields | {'embedding': 3}
  config['attention'] |= {'score': 'additive', 'alignment': 'softmax', 'features': 4}
  model = build(config, len(vocabulary), len(vocabulary))
  ids = jnp.ones((1, 2), jnp.int32)
  params = model.init(jax.random.key(1), ids, ids > 0, ids)['params']
  # Longer hypotheses rank higher, so that the untrained model emits words.
  ranking = Ranking(alpha=3.0)
  predictor = Predictor(model, params, vocabulary, vocabulary, buckets=[(8, 8)], max_length=6, ranking=ranking)
  lines = ['Oslo Rom', 'Bern Bern a Kiel', 'Ulm']
  predicted_words = []
  for line, prediction in zip(lines, predictor(lines, beams=beams), strict=True):
    hypothesis = prediction.hypotheses[0]
    assert set(hypothesis.tokens) <= set(line.split()) and hypothesis.text == ' '.join(hypothesis.tokens)
    predicted_words += hypothesis.tokens
  assert 'Oslo' in predicted_words or 'Bern' in predicted_words


METHODS = [BeamSearch(1), BeamSearch(4), Sampling(4), Sampling(4, temperature=20.0)]
ALIGNMENTS = ['softmax', 'hardmax', 'monotonic', 'local_m(width=0)', 'sparsemax']


@pytest.mark.parametrize(('method', 'alignment'), sample_cases([*itertools.product(METHODS, ALIGNMENTS)], 4), ids=str)
def test_pointers_emit_words_of_the_source_alone(method, alignment):
  model = build_tiny(sizes=SIZES, output='pointer', alignment=alignment)
  source, mask, target = copying_inputs()
  params = variables(model, source, mask, target, scale=3.0)
  seeds = sampling_seeds(method, len(source))
  hypotheses = compile_search(model, method, 6, DEFAULT_RANKING)(params['params'], source, mask, seeds)
  for words, is_real, tokens, lengths in zip(source, mask, hypotheses.tokens, hypotheses.lengths, strict=True):
    for ids, length in zip(tokens, lengths, strict=True):
      assert set(ids[:length].tolist()) <= {*words[is_real].tolist(), EOS}
  log_probs = hypotheses.log_probs[hypotheses.lengths > 0]
  assert np.isfinite(log_probs).all() and (log_probs > -1e6).all()


def sampling_seeds(method, rows):
  """Returns seeds and numbers of the sources for sampling, None for search."""
  return (jnp.zeros(rows, jnp.int32), jnp.arange(rows)) if isinstance(method, Sampling) else None


@pytest.mark.parametrize('output', ['pointer', 'pointer_generator'])
def test_label_smoothing_does_not_depend_on_padding(output):
  model = build_tiny(sizes=SIZES, output=output)
  source, mask, target = copying_inputs()
  params = variables(model, source, mask, target)
  target_mask = jnp.ones_like(target, bool)
  losses = []
  for padding in (0, 9):
    padded_source = jnp.pad(source, ((0, 0), (0, padding)))
    padded_mask = jnp.pad(mask, ((0, 0), (0, padding)))
    logits = model.apply(params, padded_source, padded_mask, target).logits
    losses.append(float(cross_entropy(logits, target, target_mask, 0.1, emittable(logits))['loss']))
  assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] < 40 * target.size
