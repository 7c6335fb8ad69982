"""Interventions on an encoder-decoder: edited weights, replaced source vectors, and recorded self-attention.

An edited model is an EncoderDecoder, so that scoring, search and gradients apply to it. No function changes its
arguments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError
from attention_jax.functional.edits import resolve_edit, with_edit
from attention_jax.models.encoded import EmbedsTokens, Encoded
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.models.layered import LayeredDecoder
from attention_jax.modules.attention import Attention


class FixedVectors(nn.Module):
  """An embedding that returns the same vectors [B, S, E] for all ids."""

  vectors: jax.Array

  def __call__(self, ids: jax.Array, deterministic: bool = True) -> jax.Array:
    return self.vectors


class AnalysedPair(NamedTuple):
  """A source and a target, as ids with EOS, and the model that reads them.

  The functions of this module expect ids without padding, unless they take a mask.

  Attributes:
    model: the model that reads them.
    params: its parameters.
    source: [S].
    target: [T].
  """

  model: EncoderDecoder
  params: Any
  source: jax.Array
  target: jax.Array


def edited_model(model: EncoderDecoder, edit: Any) -> EncoderDecoder:
  """Returns the model with edited attention weights; its parameters are those of the model itself.

  The edit applies to the decoder's attention over the source: to every layer and head, or to those that the edit
  names. An edited alignment is an alignment like any other: search, scoring and gradients work with the edited model.

  Args:
    model: the model.
    edit: a spec string of EDITS, such as 'fixed(at=2, position=1, layer=0, head=3)', a function, or a
      functional.edits.Edit, which names the layer and the head of a function.

  Raises:
    UserError: for a decoder without attention, a layer or head that it does not have, and as `with_edit`, except that
      an edit of one layer is allowed.
  """
  if not model.traits.attends:
    raise UserError('edit: this decoder does not attend; expected a model with attention weights')
  edit = resolve_edit(edit)
  attentions = list(model.decoder.attentions)
  _check_index('layer', edit.layer, len(attentions))
  _check_index('head', edit.head, attentions[0].heads)
  for layer in range(len(attentions)) if edit.layer is None else [edit.layer]:
    alignment = with_edit(attentions[layer].alignment, edit._replace(layer=None))
    attentions[layer] = attentions[layer].clone(alignment=alignment, implementation='xla')
  return model.clone(decoder=model.decoder.with_attentions(attentions))


def _check_index(name: str, index: int | None, count: int) -> None:
  if index is not None and index >= count:
    raise UserError(f'edit: {name} must be less than {count}, the number of attention {name}s, got {index}')


def output_log_probs(pair: AnalysedPair, mask: jax.Array | None = None) -> jax.Array:
  """Returns the log-probabilities of all outputs at every step, [T, V], by teacher forcing.

  If the output layer copies, the outputs are the vocabulary and the positions of the source, [T, V + S].

  Args:
    pair: the source and the target.
    mask: [S], the positions of the source that are read; by default all.
  """
  mask = jnp.ones(pair.source.shape, bool) if mask is None else mask
  outputs = pair.model.apply({'params': pair.params}, pair.source[None], mask[None], pair.target[None])
  return jax.nn.log_softmax(outputs.logits[0])


def target_log_probs(pair: AnalysedPair, mask: jax.Array | None = None) -> jax.Array:
  """Returns log p(yₜ | y₁ ... yₜ₋₁, source), [T]; arguments as in `output_log_probs`."""
  return jnp.take_along_axis(output_log_probs(pair, mask), pair.target[:, None], axis=1)[:, 0]


def source_vectors(pair: AnalysedPair) -> jax.Array:
  """Returns the embeddings of the source, [S, E].

  Raises:
    UserError: for an encoder that embeds no tokens.
  """
  if not isinstance(pair.model.encoder, EmbedsTokens):
    raise UserError('the vectors of the source need an encoder that embeds tokens; this encoder has no embedding')

  def embed(model):
    return model.encoder.embedding(pair.source, True)

  return pair.model.apply({'params': pair.params}, method=embed)


def with_vectors(pair: AnalysedPair, vectors: jax.Array) -> AnalysedPair:
  """Returns the pair with other source embeddings, [S, E]."""
  encoder = pair.model.encoder.clone(embedding=FixedVectors(vectors[None]))
  params = dict(pair.params)
  if 'embedding' not in params:  # flax stores the parameters of a shared module with the first of its owners
    params['embedding'] = params['encoder']['embedding']
  return pair._replace(model=pair.model.clone(encoder=encoder), params=params)


def encode_source(pair: AnalysedPair) -> Encoded:
  """Returns the encoded source, with a batch axis of 1."""

  def encode(model):
    return model.encoder(pair.source[None], jnp.ones((1, *pair.source.shape), bool), True)

  return pair.model.apply({'params': pair.params}, method=encode)


def source_updates(pair: AnalysedPair) -> jax.Array:
  """Returns how often adaptive computation time updates the state at each position, [layers x directions, S].

  Raises:
    UserError: for an encoder without adaptive computation time.
  """
  layers = encode_source(pair).ponder
  if not layers:
    raise UserError("this encoder has no adaptive computation time; expected the encoder 'act'")
  return jnp.stack([layer.updates[0] for layer in layers])


def encoder_weights(pair: AnalysedPair) -> jax.Array:
  """Returns the weights of the encoder's self-attention or intra-attention, [layers x directions, N, S, S].

  Raises:
    UserError: for an encoder that does not attend to its own positions.
  """
  layers = []

  def record(next_call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext):
    if not (isinstance(context.module, Attention) and context.method_name == 'parallel'):
      return next_call(*args, **kwargs)
    attended = next_call(*args, **kwargs | {'return_weights': True})
    layers.append(attended.weights if context.module.heads > 1 else attended.weights[:, None])
    return attended

  with nn.intercept_methods(record):
    encoded = encode_source(pair)
  layers += [weights[:, None] for weights in encoded.weights]
  if not layers:
    raise UserError("this encoder has no self-attention; expected the encoder 'transformer' or 'lstmn'")
  return jnp.stack(layers)[:, 0]


def value_vectors(pair: AnalysedPair) -> jax.Array:
  """Returns the vectors that the decoder's attention weighs and adds, [S, V].

  Raises:
    UserError: for a decoder without attention or with attention in each of its layers, and for attention that projects
      its values, as several heads do.
  """
  decoder = pair.model.decoder
  if not decoder.traits.attends or isinstance(decoder, LayeredDecoder) or decoder.attention.projects_values:
    raise UserError(
      'this decoder has no single attention that weighs its values unprojected; expected a recurrent decoder whose '
      'attention has one head and does not project values'
    )

  def remember(params):
    inputs = (pair.source[None], jnp.ones((1, *pair.source.shape), bool), pair.target.size)
    _, memory = pair.model.apply({'params': params}, *inputs, method='start')
    return memory.memory.value[0, 0]

  return jax.jit(remember)(pair.params)
