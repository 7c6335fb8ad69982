"""Cross entropy against loops and optax; masked positions have no effect; rows of several pairs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.data.batching import dummy_batch, gather, gather_packed
from attention_jax.data.encoding import EncodedCorpus
from attention_jax.errors import UserError
from attention_jax.kernels.api import IMPLEMENTATIONS
from attention_jax.losses.sequence import cross_entropy, sequence_loss
from attention_jax.modules.positions import POSITIONS
from attention_jax.systems.base import trace_loss
from attention_jax.tokens import EOS, UNK
from tests.losses.helpers import V
from tests.models.helpers import SOURCE_WORDS, TARGET_WORDS, build_conv, build_tiny, build_transformer
from tests.training.helpers import WORDS, Toy, init_params, make_batch


@pytest.mark.long
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_cross_entropy_equals_a_loop(case, smoothing):
  logits, target, mask = map(np.asarray, case)
  loss = 0.0
  correct = 0
  for b, t in zip(*np.nonzero(mask), strict=True):
    p = np.exp(logits[b, t].astype(np.float64))
    p /= p.sum()
    labels = np.full(V, smoothing / V)
    labels[target[b, t]] += 1 - smoothing
    loss -= sum(labels[v] * np.log(p[v]) for v in range(V))
    correct += p.argmax() == target[b, t]
  sums = cross_entropy(*case, smoothing)
  np.testing.assert_allclose(sums['loss'], loss, rtol=1e-5)
  assert sums['tokens'] == 7 and sums['accuracy'] == correct


@pytest.mark.long
@pytest.mark.parametrize('junk', [np.nan, np.inf, 1e30])
def test_masked_positions_affect_neither_value_nor_gradient(case, junk):
  logits, target, mask = case

  def loss(logits):
    return cross_entropy(logits, target, mask, 0.1)['loss']

  run = jax.jit(jax.value_and_grad(loss))
  value, gradient = run(jnp.where(mask[..., None], logits, junk))
  jax.tree.map(np.testing.assert_array_equal, (value, gradient), run(logits))
  assert not np.any(np.asarray(gradient)[~np.asarray(mask)])


def test_bfloat16_logits_are_computed_in_float32_and_forbidden_words_leave_the_loss_finite(case):
  logits, target, mask = case
  rounded = logits.astype(jnp.bfloat16)
  loss = cross_entropy(rounded, target, mask)['loss']
  assert loss.dtype == jnp.float32 and loss == cross_entropy(rounded.astype(jnp.float32), target, mask)['loss']
  forbidden = logits.at[..., 0].set(-jnp.inf)
  assert jnp.isfinite(cross_entropy(forbidden, jnp.maximum(target, 1), mask)['loss'])


@pytest.mark.long
def test_padding_and_filler_rows_do_not_change_the_sums():
  loss = jax.jit(sequence_loss(Toy(), 0.1))
  batch = make_batch(0)
  with_fillers = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), batch)
  padded = {name: np.pad(x, ((0, 0), (0, 3))) for name, x in with_fillers._asdict().items() if np.ndim(x) == 2}
  assert padded.keys() == {'source', 'source_mask', 'target', 'target_mask'}
  actual, expected = (loss(init_params(), x) for x in (with_fillers._replace(**padded), batch))
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=1e-5)


def test_target_ids_that_the_model_cannot_emit_count_as_unknown():
  loss = jax.jit(sequence_loss(Toy(), 0.1))
  batch = make_batch(0)

  def with_first_token(id):
    target = batch.target.copy()
    target[::2, 0] = id
    return loss(init_params(), batch._replace(target=target))

  jax.tree.map(np.testing.assert_array_equal, with_first_token(WORDS + 2), with_first_token(UNK))


@pytest.mark.long
def test_rngs_enable_dropout():
  loss = jax.jit(sequence_loss(Toy(dropout=0.5)))
  rngs = [None, *({'dropout': jax.random.key(i)} for i in range(2))]
  assert len({float(loss(init_params(), make_batch(0), rng)['loss']) for rng in rngs}) == 3


@pytest.mark.long
def test_kernels_get_the_lengths_of_a_batch_and_no_array(monkeypatch):
  auto = IMPLEMENTATIONS['auto']
  masks = []

  def attend_batch(problem, axes):
    masks.append(problem.memory.mask)
    return auto.attend_batch(problem, axes)

  monkeypatch.setitem(IMPLEMENTATIONS, 'auto', auto._replace(attend_batch=attend_batch))
  model = build_transformer('layers=1', 'layers=1')
  batch = gather(make_pairs(), np.arange(len(PAIR_LENGTHS)), (7, 6))
  params = param_shapes(model)
  masks.clear()
  jax.eval_shape(sequence_loss(model), params, batch)
  of_source, causal, of_memory = masks
  assert of_source.remainder is causal.remainder is of_memory.remainder is None
  assert of_source.length is not None and of_memory.length is not None and causal.length is None


# ------------------------------------------------------------------------------------------------ rows of several pairs

PAIR_LENGTHS = np.array([(4, 3), (2, 5), (7, 1), (1, 2), (3, 3), (5, 6)])
PACKED_PAIRS = np.array([(1, 4, 3), (5, 0, -1), (2, -1, -1), (-1, -1, -1)])
PACKED_OPTIONS = ['position="rope", window=2, kv_heads=2, norm_first=True']
LONG_PACKED_OPTIONS = [f'position={name!r}' for name in POSITIONS] + [
  'alignment="stick_breaking"',
  'score="additive", alignment="local_p(width=2)"',
  'alignment="scalable_softmax", differential=True',
]


def make_pairs():
  rng = np.random.default_rng(0)
  sides = []
  for lengths, words in zip(PAIR_LENGTHS.T, (SOURCE_WORDS, TARGET_WORDS), strict=True):
    offsets = np.cumsum([0, *lengths])
    ids = rng.integers(4, words, offsets[-1], dtype=np.int32)
    ids[offsets[1:] - 1] = EOS
    sides += [ids, offsets]
  return EncodedCorpus(*sides)


def param_shapes(model):
  batch = dummy_batch()
  return jax.eval_shape(model.init, jax.random.key(0), batch.source, batch.source_mask, batch.target)['params']


@pytest.mark.parametrize(
  'options', [*PACKED_OPTIONS, *(pytest.param(options, marks=pytest.mark.long) for options in LONG_PACKED_OPTIONS)]
)
def test_packed_loss_and_gradients_equal_those_of_single_pairs(options):
  model = build_transformer(f'layers=1, {options}', f'layers=1, {options}')
  split = make_pairs()
  packed = gather_packed(split, PACKED_PAIRS, (9, 11))
  single = gather(split, np.arange(len(PAIR_LENGTHS)), (7, 6))
  assert packed.source_mask.sum() == single.source_mask.sum() and packed.segments[0].max() == 3
  loss = sequence_loss(model, 0.1)
  rng = np.random.default_rng(1)
  params = jax.tree.map(lambda x: 0.5 * rng.standard_normal(x.shape, np.float32), param_shapes(model))

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def run(params, batch):
    sums = loss(params, batch)
    return sums['loss'], sums

  ((_, actual), actual_grads), ((_, expected), expected_grads) = run(params, packed), run(params, single)
  assert actual['tokens'] == PAIR_LENGTHS[:, 1].sum()
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), actual, expected)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), actual_grads, expected_grads)


@pytest.mark.parametrize(
  ('model', 'loss', 'reason'),
  [
    (build_tiny(), {}, 'encoder'),
    (build_conv(), {}, 'encoder'),
    (build_transformer(encoder_spec='embedded'), {}, 'encoder'),
    (build_transformer('window=3, sinks=1'), {}, 'encoder'),
    (build_transformer('score="location"'), {}, 'encoder'),
    (build_transformer(decoder_spec='bahdanau(features=8, readout=9)'), {}, 'decoder'),
    (build_transformer(decoder_spec='plain(features=8)', heads=1), {}, 'decoder'),
    (build_transformer(decoder_spec='conv(features=8, layers=2)', heads=1), {}, 'decoder'),
    (build_transformer('', 'alignment="monotonic"'), {}, 'decoder'),
    (build_transformer(alignment='local_m'), {}, 'decoder'),
    (build_transformer(score='location'), {}, 'decoder'),
    (build_transformer(output='pointer', sizes=(11, 11)), {}, 'output layer'),
    (build_transformer(), {'auxiliary': 'coverage'}, 'coverage'),
    (build_transformer(), {'objective': 'minimum_risk'}, 'minimum_risk'),
    (build_transformer(), {'objective': 'reinforce'}, 'reinforce'),
  ],
)
def test_what_does_not_support_packed_rows_raises(model, loss, reason):
  with pytest.raises(UserError, match=rf'data.packed must be False.*{reason}') as error:
    trace_loss(sequence_loss(model, **loss), param_shapes(model), dummy_batch(packed=True))
  assert '\n' not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize('objective', ['r_drop', 'scheduled_sampling(schedule="linear(start=0.5)")'])
def test_objectives_per_token_support_packed_rows(objective):
  model = build_transformer(dropout=0.1)
  trace_loss(sequence_loss(model, objective=objective), param_shapes(model), dummy_batch(packed=True))
