"""Small encoder-decoders, with a different size on every axis where the formulas permit it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.models.encoder_decoder import EncoderDecoder, ModelConfig, build, shift_right
from attention_jax.modules.attention import Attention
from attention_jax.specs import parse
from tests.modules.helpers import variables

B, T, S = 3, 5, 7
SOURCE_WORDS, TARGET_WORDS = 11, 13
EMBEDDING, ENCODED, STATE, READOUT, FEATURES = 4, 10, 8, 9, 6
FORWARD_ENCODER = f'rnn(rnn="gru", features={ENCODED})'
LENGTHS = np.array([S, 4, 2])
# With one head, these scores require states and memory of the same width.
EQUAL_WIDTH_SCORES = ('dot', 'scaled_dot', 'cosine', 'normed_dot', 'elu_dot')


def build_tiny(
  cell: str = 'bahdanau',
  options: str = '',
  *,
  score: str = 'additive',
  alignment: str = 'softmax',
  heads: int = 1,
  encoder: str = f'birnn(rnn="simple", features={ENCODED})',
  sizes=(SOURCE_WORDS, TARGET_WORDS),
  **fields,
) -> EncoderDecoder:
  """Builds a recurrent model: `options` are those of the cell, such as 'layers=2', `fields` those of ModelConfig."""
  needs_equal_width = score in EQUAL_WIDTH_SCORES and heads == 1 and cell != 'plain'
  cell_options = [f'features={ENCODED if needs_equal_width else STATE}']
  if cell == 'bahdanau':
    cell_options.append(f'readout={READOUT}')
  if options:
    cell_options.append(options)
  fields = {'embedding': EMBEDDING, 'attention': Attention(score, alignment, FEATURES, heads)} | fields
  return build(ModelConfig(encoder, f'{cell}({", ".join(cell_options)})', **fields), *sizes)


def build_streaming(
  cell: str = 'luong',
  options: str = 'rnn="gru"',
  encoder: str = FORWARD_ENCODER,
  score='additive',
  alignment: str = 'monotonic',
  **fields,
) -> EncoderDecoder:
  """Builds a model that can decode while its source arrives."""
  return build_tiny(cell, f'{options}, bridge=False', encoder=encoder, score=score, alignment=alignment, **fields)


def inputs(seed: int = 0, lengths=LENGTHS, steps: int = T, sizes=(SOURCE_WORDS, TARGET_WORDS)):
  """Returns source [B, S], source_mask [B, S] of these lengths, and target [B, T]."""
  random = np.random.default_rng(seed)
  size = max(lengths)
  source = random.integers(3, sizes[0], (len(lengths), size), dtype=np.int32)
  target = random.integers(3, sizes[1], (len(lengths), steps), dtype=np.int32)
  mask = np.arange(size) < np.asarray(lengths)[:, None]
  return jnp.asarray(source), jnp.asarray(mask), jnp.asarray(target)


def with_params(model, **options):
  """Returns random parameters of a model, and its inputs."""
  args = inputs()
  return variables(model, *args, **options), args


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, source, mask, target):
  """Returns the outputs of all steps at once."""
  return model.apply(params, source, mask, target)._replace(linear=())


@functools.partial(jax.jit, static_argnums=0)
def run_steps(model, params, source, mask, target):
  """Returns the outputs of one step after the other; the maximum length is that of the target plus 2."""
  carry, memory = model.apply(params, source, mask, target.shape[1] + 2, method='start')
  assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(carry)), 'search reorders the first axis'

  def step(carry, token):
    return model.apply(params, carry, token, memory, method='step')

  _, outputs = jax.lax.scan(step, carry, shift_right(target).T)
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)


TRANSFORMER_FEATURES = 8  # of embeddings, layers and attention


def build_transformer(
  encoder: str = '',
  decoder: str = '',
  *,
  score: str = 'scaled_dot',
  alignment: str = 'softmax',
  heads: int = 4,
  features: int = TRANSFORMER_FEATURES,
  encoder_spec: str = '',
  decoder_spec: str = '',
  sizes=(SOURCE_WORDS, TARGET_WORDS),
  **fields,
) -> EncoderDecoder:
  """Builds a Transformer with two layers on either side, of other options or replaced by another spec."""
  encoder_spec = encoder_spec or _transformer_spec(encoder)
  decoder_spec = decoder_spec or _transformer_spec(decoder)
  fields = {'embedding': TRANSFORMER_FEATURES, 'attention': Attention(score, alignment, features, heads)} | fields
  return build(ModelConfig(encoder_spec, decoder_spec, **fields), *sizes)


def build_conv(
  encoder: str = '',
  decoder: str = '',
  *,
  score='dot',
  alignment='softmax',
  heads=1,
  encoder_spec='',
  decoder_spec='',
  sizes=(SOURCE_WORDS, TARGET_WORDS),
  **fields,
) -> EncoderDecoder:
  """Builds a convolutional model with two layers on either side; arguments as in `build_transformer`."""
  encoder = encoder_spec or f'conv(features=5, layers=2{encoder and ", " + encoder})'
  decoder = decoder_spec or f'conv(features=6, layers=2{decoder and ", " + decoder})'
  fields = {'embedding': EMBEDDING, 'attention': Attention(score, alignment, 8, heads)} | fields
  return build(ModelConfig(encoder, decoder, **fields), *sizes)


def _transformer_spec(options: str) -> str:
  """Returns a spec with `options` in place of the default ones."""
  merged = {'features': TRANSFORMER_FEATURES, 'layers': 2, 'heads': 4, 'hidden': 10}
  if options:
    merged |= parse(f'transformer({options})')[1]
  return f'transformer({", ".join(f"{name}={value!r}" for name, value in merged.items())})'
