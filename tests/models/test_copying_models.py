"""Models whose output layer says words of the source, whatever the vocabulary holds."""

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
from attention_jax.models.encoder_decoder import build
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


def given(seed=0):
  """Sources and targets with words that the vocabulary does not know: the id WORDS + s stands at s first."""
  source, mask, target = inputs(seed, sizes=SIZES)
  source = source.at[:, 1].set(WORDS + 1).at[0, 4].set(WORDS + 1)
  return source, mask, target.at[:, 0].set(WORDS + 1)


EACH = [('bahdanau', output) for output in (*COPYING, 'pointer_generator(tied=True)')]
EACH += [('luong', 'copynet'), ('gnmt', 'pointer_generator'), ('transformer', 'copynet'), ('conv', 'pointer_generator')]


@pytest.mark.parametrize(('decoder', 'output'), EACH)
def test_steps_say_what_all_at_once_say(decoder, output):
  model, (source, mask, target) = MODELS[decoder](output), given()
  params = variables(model, source, mask, target)
  outputs = jax.jit(model.apply)(params, source, mask, target)
  assert outputs.logits.shape == (*target.shape, WORDS + S) and outputs.linear == ()
  np.testing.assert_allclose(jnp.exp(outputs.logits).sum(-1), np.ones(target.shape), rtol=1e-4)
  carry, memory = model.apply(params, source, mask, T, method='start')
  step = jax.jit(lambda carry, token: model.apply(params, carry, token, memory, method='step'))
  entering = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=1)
  for t in range(T):
    carry, one = step(carry, entering[:, t])
    np.testing.assert_allclose(one.logits, outputs.logits[:, t], rtol=2e-4, atol=2e-4)


def test_pointers_say_where_the_weights_are():
  model, (source, mask, target) = MODELS['bahdanau']('pointer'), given()
  params = variables(model, source, mask, target)
  outputs = jax.jit(model.apply)(params, source, mask, target)
  for b in range(len(source)):
    for word_ in set(np.asarray(source[b])[np.asarray(mask[b])].tolist()):
      whole = np.asarray(outputs.weights[b])[:, (np.asarray(source[b]) == word_) & np.asarray(mask[b])].sum(-1)
      np.testing.assert_allclose(jnp.exp(outputs.logits[b, :, word_]), whole, rtol=1e-4)


@pytest.mark.parametrize(('decoder', 'output'), list(itertools.product(MODELS, COPYING)))
def test_everything_copies(decoder, output):
  model, (source, mask, target) = MODELS[decoder](output), given()
  both = lambda *given: model.init_with_output(jax.random.key(0), *given)[0]
  assert jax.eval_shape(both, source, mask, target).logits.shape == (*target.shape, WORDS + S)


@pytest.mark.parametrize('output', COPYING)
def test_unknown_words_are_read_as_unknown_and_padding_tells_nothing(output):
  model, (source, mask, target) = MODELS['bahdanau'](output), given()
  params = variables(model, source, mask, target)
  run = jax.jit(model.apply)
  outputs = run(params, source, mask, target)
  moved = run(params, jnp.where(mask, source, WORDS + 2), mask, target)
  np.testing.assert_allclose(moved.logits, outputs.logits, atol=1e-5)
  plain = jnp.where(source >= WORDS, UNK, source)
  np.testing.assert_allclose(run(params, plain, mask, target).weights, outputs.weights, atol=1e-6)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'sizes': (11, 13)}, 'copies and needs a shared vocabulary; got 11 and 13 tokens'),
    ({'cell': 'plain'}, 'copies by weights, and this decoder attends to nothing'),
    ({'alignment': 'latent'}, 'copies by weights, a latent alignment sums over positions; possible: vocabulary, tied'),
    ({'output': 'pointer(tied=True)'}, "unknown option of output 'pointer': 'tied'"),
  ],
)
def test_what_cannot_copy_says_so(fields, message):
  with pytest.raises(UserError, match=message):
    build_tiny(**{'sizes': SIZES, 'output': 'pointer', **fields})


def test_words_have_the_place_where_they_stand_first():
  vocabulary = word(['a b c'])  # ids 4, 5, 6
  corpus = Corpus(['a Oslo b Oslo Rom', 'c c'], ['Rom a Oslo Bern', 'a Oslo'])
  encoded = encode(corpus, vocabulary, vocabulary)
  size = len(vocabulary)
  assert encoded.source.tolist() == [4, size + 1, 5, size + 1, size + 4, EOS, 6, 6, EOS]
  assert encoded.target.tolist() == [size + 4, 4, size + 1, UNK, EOS, 4, UNK, EOS]
  assert vocabulary.decode([size + 4, 4, size + 1, UNK, EOS], corpus.source[0].split()) == 'Rom a Oslo <unk>'


@pytest.mark.parametrize('beams', [1, 3])
def test_unknown_words_come_out_as_they_are_written(beams):
  vocabulary = word(['a b c'])
  attention = {'score': 'additive', 'alignment': 'softmax', 'features': 4}
  fields = {'encoder': 'birnn(features=6)', 'decoder': 'bahdanau(features=5, readout=4)', 'output': 'pointer'}
  config = default_config().model.to_dict() | fields | {'embedding': 3}
  config['attention'] |= attention
  model = build(config, len(vocabulary), len(vocabulary))
  ids = jnp.ones((1, 2), jnp.int32)
  params = model.init(jax.random.key(1), ids, ids > 0, ids)['params']
  longer = Ranking(alpha=3.0)  # are preferred, as nothing has been learned
  predictor = Predictor(model, params, vocabulary, vocabulary, buckets=[(8, 8)], max_length=6, ranking=longer)
  lines, written = ['Oslo Rom', 'Bern Bern a Kiel', 'Ulm'], []
  for line, prediction in zip(lines, predictor(lines, beams=beams), strict=True):
    said = prediction.hypotheses[0]
    assert set(said.tokens) <= set(line.split()) and said.text == ' '.join(said.tokens)
    written += said.tokens
  assert 'Oslo' in written or 'Bern' in written


HOW = [BeamSearch(1), BeamSearch(4), Sampling(4), Sampling(4, temperature=20.0)]
WEIGHED = ['softmax', 'hardmax', 'monotonic', 'local_m(width=0)', 'sparsemax']


@pytest.mark.parametrize(('how', 'alignment'), sample_cases([*itertools.product(HOW, WEIGHED)], 4), ids=str)
def test_nothing_is_said_that_cannot_be(how, alignment):
  model = build_tiny(sizes=SIZES, output='pointer', alignment=alignment)
  source, mask, target = given()
  params = variables(model, source, mask, target, scale=3.0)
  found = compile_search(model, how, 6, DEFAULT_RANKING)(params['params'], source, mask, drawn(how, len(source)))
  for words, real, tokens, lengths in zip(source, mask, found.tokens, found.lengths, strict=True):
    for ids, length in zip(tokens, lengths, strict=True):
      assert set(ids[:length].tolist()) <= {*words[real].tolist(), EOS}
  assert np.isfinite(found.log_probs[found.lengths > 0]).all() and (found.log_probs[found.lengths > 0] > -1e6).all()


def drawn(how, rows):
  return (jnp.zeros(rows, jnp.int32), jnp.arange(rows)) if isinstance(how, Sampling) else None


@pytest.mark.parametrize('output', ['pointer', 'pointer_generator'])
def test_smoothing_does_not_know_the_padding(output):
  model = build_tiny(sizes=SIZES, output=output)
  source, mask, target = given()
  params = variables(model, source, mask, target)
  real = jnp.ones_like(target, bool)
  losses = []
  for more in (0, 9):
    wide = jnp.pad(source, ((0, 0), (0, more))), jnp.pad(mask, ((0, 0), (0, more)))
    logits = model.apply(params, *wide, target).logits
    found = cross_entropy(logits, target, real, 0.1, emittable(logits))
    losses.append(float(found['loss']))
  assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] < 40 * target.size
