"""Models with an output layer that copies words of the source, out-of-vocabulary words included."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.batching import Batch
from attention_jax.data.encoding import encode
from attention_jax.data.text import Corpus
from attention_jax.data.vocab import word
from attention_jax.decoding.compiled_search import BeamSearch, compile_search
from attention_jax.decoding.constraints import Constraints
from attention_jax.decoding.predictor import Predictor
from attention_jax.decoding.ranking import DEFAULT_RANKING, Ranking
from attention_jax.decoding.sampling import Sampling
from attention_jax.errors import UserError
from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import ModelConfig, build
from attention_jax.modules.attention import Attention
from attention_jax.modules.outputs import OUTPUTS
from attention_jax.tokens import EOS, PAD, UNK
from tests.models.helpers import S, build_conv, build_tiny, build_transformer, inputs, run_steps
from tests.modules.helpers import assert_close, variables
from tests.sampled_cases import sample_cases

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


def copy_inputs(seed=0):
  """Sources and targets with out-of-vocabulary words; id WORDS + s is the word that first occurs at position s."""
  source, mask, target = inputs(seed, sizes=SIZES)
  source = source.at[:, 1].set(WORDS + 1).at[0, 4].set(WORDS + 1)
  return source, mask, target.at[:, 0].set(WORDS + 1)


CASES = [('bahdanau', output) for output in (*COPYING, 'pointer_generator(tied=True)')]
CASES += [('luong', 'copynet'), ('gnmt', 'pointer_generator'), ('transformer', 'copynet')]
CASES += [('conv', 'pointer_generator')]


@pytest.mark.long
@pytest.mark.parametrize(('decoder', 'output'), sample_cases(CASES, 4))
def test_steps_equal_all_at_once(decoder, output):
  model = MODELS[decoder](output)
  args = copy_inputs()
  params = variables(model, *args)
  outputs = jax.jit(model.apply)(params, *args)
  assert outputs.logits.shape == (*args[2].shape, WORDS + S) and outputs.linear == ()
  np.testing.assert_allclose(jnp.exp(outputs.logits).sum(-1), np.ones(args[2].shape), rtol=1e-4)
  assert_close(run_steps(model, params, *args).logits, outputs.logits, rtol=2e-4, atol=2e-4)


@pytest.mark.long
def test_pointer_probability_of_a_word_is_the_sum_of_its_weights():
  model = MODELS['bahdanau']('pointer')
  args = copy_inputs()
  outputs = jax.jit(model.apply)(variables(model, *args), *args)
  source, mask, weights = map(np.asarray, (*args[:2], outputs.weights))
  for b, row in enumerate(source):
    for word_id in set(row[mask[b]].tolist()):
      expected = weights[b][:, (row == word_id) & mask[b]].sum(-1)
      np.testing.assert_allclose(jnp.exp(outputs.logits[b, :, word_id]), expected, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize('output', COPYING)
def test_out_of_vocabulary_words_are_embedded_as_unknown_and_padding_has_no_effect(output):
  model = MODELS['bahdanau'](output)
  source, mask, target = args = copy_inputs()
  params = variables(model, *args)
  run = jax.jit(model.apply)
  outputs = run(params, source, mask, target)
  other_padding = run(params, jnp.where(mask, source, WORDS + 2), mask, target)
  np.testing.assert_allclose(other_padding.logits, outputs.logits, atol=1e-5)
  source_with_unknown = jnp.where(source >= WORDS, UNK, source)
  np.testing.assert_allclose(run(params, source_with_unknown, mask, target).weights, outputs.weights, atol=1e-6)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'sizes': (11, 13)}, 'copies.* shared vocabulary.* got 11 and 13 tokens'),
    ({'cell': 'plain'}, 'copies.* source, .*this decoder does not attend to it; expected .*: vocabulary, tied'),
    ({'alignment': 'latent'}, 'copies.* latent alignment.*: vocabulary, tied'),
    ({'output': 'pointer(tied=True)'}, "output 'pointer' has no options, got 'tied'"),
  ],
)
def test_models_that_cannot_copy_raise(fields, message):
  with pytest.raises(UserError, match=message):
    build_tiny(**{'sizes': SIZES, 'output': 'pointer', **fields})


def test_out_of_vocabulary_ids_encode_the_first_source_position():
  vocabulary = word(['a b c'])  # ids 4, 5, 6
  corpus = Corpus(['a Oslo b Oslo Rom', 'c c'], ['Rom a Oslo Bern', 'a Oslo'])
  encoded = encode(corpus, vocabulary, vocabulary)
  size = len(vocabulary)
  assert encoded.source.tolist() == [4, size + 1, 5, size + 1, size + 4, EOS, 6, 6, EOS]
  assert encoded.target.tolist() == [size + 4, 4, size + 1, UNK, EOS, 4, UNK, EOS]
  assert vocabulary.decode([size + 4, 4, size + 1, UNK, EOS], corpus.source[0].split()) == 'Rom a Oslo <unk>'


@pytest.mark.long
@pytest.mark.parametrize('beams', [1, 3])
def test_predictions_contain_copied_words_verbatim(beams):
  vocabulary = word(['a b c'])
  specs = {'encoder': 'birnn(features=6)', 'decoder': 'bahdanau(features=5, readout=4)', 'output': 'pointer'}
  config = ModelConfig(**specs, embedding=3, attention=Attention('additive', 'softmax', features=4))
  model = build(config, len(vocabulary), len(vocabulary))
  ids = jnp.ones((1, 2), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(1), ids, ids > 0, ids)['params']
  ranking = Ranking(alpha=3.0)  # prefers long hypotheses, because an untrained model ends early
  predictor = Predictor(model, params, vocabulary, vocabulary, buckets=[(8, 8)], max_length=6, ranking=ranking)
  lines = ['Oslo Rom', 'Bern Bern a Kiel', 'Ulm']
  predicted = []
  for line, prediction in zip(lines, predictor(lines, beams=beams), strict=True):
    best = prediction.hypotheses[0]
    assert set(best.tokens) <= set(line.split())
    assert best.text == ' '.join(best.tokens)
    predicted += best.tokens
  assert 'Oslo' in predicted or 'Bern' in predicted


SEARCHES = [BeamSearch(1), BeamSearch(4), Sampling(4), Sampling(4, temperature=20.0)]
ALIGNMENTS = ['softmax', 'hardmax', 'monotonic', 'local_m(width=0)', 'sparsemax']


@pytest.mark.long
@pytest.mark.parametrize(('search', 'alignment'), sample_cases([*itertools.product(SEARCHES, ALIGNMENTS)], 8), ids=str)
def test_pointer_emits_only_source_words_and_eos(search, alignment):
  model = build_tiny(sizes=SIZES, output='pointer', alignment=alignment)
  source, mask, target = copy_inputs()
  params = variables(model, source, mask, target, scale=3.0)
  compiled = compile_search(model, search, 6, DEFAULT_RANKING)
  hypotheses = compiled(params['params'], source, mask, sampling_state(search, len(source)))
  for row_source, row_mask, tokens, lengths in zip(source, mask, hypotheses.tokens, hypotheses.lengths, strict=True):
    for ids, length in zip(tokens, lengths, strict=True):
      assert set(ids[:length].tolist()) <= {*row_source[row_mask].tolist(), EOS}
  log_probs = hypotheses.log_probs[hypotheses.lengths > 0]
  assert np.isfinite(log_probs).all()
  assert (log_probs > -1e6).all()


@pytest.mark.parametrize('search', [BeamSearch(3), pytest.param(Sampling(3), marks=pytest.mark.long)], ids=str)
def test_a_word_out_of_the_vocabulary_is_the_same_token_each_time_it_is_copied(search):
  """Two words without repetition are at most two tokens, whatever the number of their occurrences."""
  model = build_tiny(sizes=SIZES, output='pointer')
  source = jnp.asarray([[WORDS + 1, WORDS + 1, WORDS + 3, WORDS + 1, EOS]])
  mask = jnp.ones_like(source, bool)
  params = variables(model, source, mask, source, scale=3.0)['params']
  expected = {(WORDS + 1, WORDS + 3, EOS), (WORDS + 3, WORDS + 1, EOS)}
  constraints = Constraints(no_repeat_ngram_size=1, min_length=2)
  compiled = compile_search(model, search, 6, DEFAULT_RANKING, constraints=constraints)
  hypotheses = compiled(params, source, mask, sampling_state(search, 1))
  found = {tuple(tokens[tokens != PAD].tolist()) for tokens in np.asarray(hypotheses.tokens[0])} - {()}
  assert found and found <= expected


def sampling_state(search, rows):
  """The extra argument of a compiled search: seeds and rows for sampling, None for beam search."""
  if isinstance(search, Sampling):
    return jnp.zeros(rows, jnp.int32), jnp.arange(rows)
  return None


@pytest.mark.long
@pytest.mark.parametrize('output', ['pointer', 'pointer_generator'])
def test_label_smoothing_is_independent_of_padding(output):
  model = build_tiny(sizes=SIZES, output=output)
  source, mask, target = args = copy_inputs()
  params = variables(model, *args)['params']
  loss = jax.jit(sequence_loss(model, 0.1))

  def padded_loss(padding):
    padded = (jnp.pad(x, ((0, 0), (0, padding))) for x in (source, mask))
    return float(loss(params, Batch(*padded, target, jnp.ones_like(target, bool), jnp.arange(len(target))))['loss'])

  assert padded_loss(0) == pytest.approx(padded_loss(9), rel=1e-5)
  assert padded_loss(0) < 30 * target.size  # 31 for 'pointer' if the smoothing had tokens that cannot be emitted
