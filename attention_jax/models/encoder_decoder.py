"""The encoder-decoder, and `build`, which makes a model from a config."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.latent import log_mixture
from attention_jax.functional.masking import zero_masked
from attention_jax.models.decoders import DECODERS, decoder_of, over_steps
from attention_jax.models.encoders import ENCODERS
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention
from attention_jax.modules.embedding import Embedding, oov_to_unk
from attention_jax.modules.outputs import OUTPUTS, CopyInputs
from attention_jax.specs import Fraction, Size, bind, check_fields, schema_of
from attention_jax.tokens import BOS

DTYPES: Mapping[str, Any] = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


class ModelOutput(NamedTuple):
  """Result of a model for targets.

  Attributes:
    logits: [B, T, V] float32. They are log-probabilities if the alignment is latent, or if the output layer copies,
      which also emits out-of-vocabulary words of the source: [B, T, V + S].
    weights: attention weights [B, T, S].
    state: private state of the alignment after each step [B, T, N, ...], () if it has none.
    likelihood: log p(y_t | position s) [B, T, S] if the alignment is latent, else ().
    linear: modules.outputs.LinearLogits, from which the logits are computed; () if they are a mixture.
    layers: weights of every layer and head [B, T, L, N, S] of a decoder with several layers of attention, else ().
  """

  logits: jax.Array
  weights: jax.Array
  state: Any = ()
  likelihood: Any = ()
  linear: Any = ()
  layers: Any = ()


class SourceMemory(NamedTuple):
  """Everything that is prepared once per source.

  Attributes:
    memory: memory of the decoder.
    kept: memory of an output layer that copies, else ().
  """

  memory: Any
  kept: Any = ()


class Pending(NamedTuple):
  """Carry of a latent alignment.

  Attributes:
    decoder: carry of the decoder.
    features: features of every position [B, S, D] from which the last token was emitted.
  """

  decoder: Any
  features: jax.Array


def shift_right(target: jax.Array) -> jax.Array:
  """Returns the inputs [B, T] of the decoder for targets [B, T]: BOS, then every token but the last."""
  return jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)


class EncoderDecoder(nn.Module):
  """An encoder, a decoder, target embeddings and an output layer."""

  encoder: nn.Module
  decoder: nn.Module
  embedding: nn.Module
  output: nn.Module

  @property
  def traits(self) -> Traits:
    """Properties of the decoder."""
    return self.decoder.traits

  @property
  def copies(self) -> bool:
    """Whether the output layer copies words of the source."""
    return self.output.copies

  def output_size(self, source_length: int) -> int:
    """Size of the output: the vocabulary and the copyable positions of the source."""
    return self.embedding.size + source_length * self.copies

  def __call__(
    self, source: jax.Array, source_mask: jax.Array, target: jax.Array, deterministic: bool = True
  ) -> ModelOutput:
    """Computes all steps with teacher forcing: each step reads the target tokens before it.

    Ids V + s, where V is the size of the vocabulary, are out-of-vocabulary words whose first source position is s.

    Args:
      source: ids [B, S].
      source_mask: [B, S], True = real.
      target: ids [B, T].
      deterministic: whether dropout and sampling are off.
    """
    encoded = self.encoder(source, source_mask, deterministic)
    inputs = shift_right(target)
    if self.traits.latent:
      return self._sum_over_positions(encoded, inputs, oov_to_unk(target, self.embedding.size), deterministic)
    embeddings = self.embedding(inputs, deterministic)
    output = self.decoder(encoded, embeddings, deterministic)
    return self._emit(output, embeddings, self._copy_memory(encoded, source))

  def start(self, source: jax.Array, source_mask: jax.Array, max_length: int) -> tuple[Any, Any]:
    """Returns the first carry and the memory, at test time, for at most `max_length` steps."""
    encoded = self.encoder(source, source_mask, True)
    carry, memory = self._start(encoded, max_length)
    return carry, SourceMemory(memory, self._copy_memory(encoded, source))

  def step(self, carry: Any, token: jax.Array, memory: SourceMemory) -> tuple[Any, ModelOutput]:
    """Reads token ids [B]; returns the carry, and ModelOutput for the next token: logits [B, V], weights [B, S]."""
    if self.traits.latent:
      carry, outputs, _ = self._latent_step(carry, token, memory.memory, True)
      return carry, outputs
    embedding = self.embedding(token)
    carry, output = self.decoder.step(carry, embedding, memory.memory)
    return carry, self._emit(output, embedding, memory.kept)._replace(linear=())

  def posterior(self, outputs: ModelOutput, target_mask: jax.Array) -> jax.Array:
    """Returns weights [B, T, S]: the posterior given the whole target if the alignment is latent, else those used.

    Masked positions of target_mask [B, T] do not influence the posterior.
    """
    latent = self.traits.latent
    if not latent:
      return outputs.weights
    one_head = jax.tree.map(lambda x: x[:, :, 0], outputs.state)
    likelihood = jnp.where(target_mask[..., None], outputs.likelihood, 0.0)
    return zero_masked(jax.vmap(latent.posterior)(outputs.weights, one_head, likelihood), target_mask)

  def _copy_memory(self, encoded, source: jax.Array) -> Any:
    """Memory of the output layer for a source."""
    return self.output.remember(encoded.memory, encoded.mask, source)

  def _emit(self, output, embeddings: jax.Array, copy_memory: Any) -> ModelOutput:
    """Applies the output layer to the output of the decoder for one step or all steps."""
    parts = tuple(part for part in (output.context, output.top, embeddings) if not isinstance(part, tuple))
    emitted = self.output(output.features, CopyInputs(copy_memory, output.weights, parts))
    return ModelOutput(emitted.logits(), output.weights, output.state, linear=emitted.linear, layers=output.layers)

  def _start(self, encoded, max_length: int) -> tuple[Any, Any]:
    carry, memory = self.decoder.start(encoded, max_length)
    latent = self.traits.latent
    if latent and latent.observe:
      # The chain starts at a known position, so that the first token, BOS, is no evidence.
      cell = self.decoder.cell
      carry = Pending(carry, jnp.zeros((*encoded.mask.shape, cell.width), cell.dtype))
    return carry, memory

  def _sum_over_positions(self, encoded, inputs: jax.Array, target: jax.Array, deterministic: bool) -> ModelOutput:
    """Computes all steps of a latent alignment in a scan, with log-probabilities [B, S, V] of one step at a time."""
    carry, memory = self._start(encoded, target.shape[1])

    def step(model, carry, tokens):
      input_token, target_token = tokens
      carry, outputs, log_probs = model._latent_step(carry, input_token, memory, deterministic)
      likelihood = jnp.take_along_axis(log_probs, target_token[:, None, None], axis=-1)[..., 0]
      return carry, outputs._replace(likelihood=likelihood)

    return over_steps(step, self)(self, carry, (inputs, target))[1]

  def _latent_step(self, carry: Any, token: jax.Array, memory: Any, deterministic: bool):
    """Returns the next carry, ModelOutput, and log p(y | position s) [B, S, V]."""
    is_observed = self.traits.latent.observe is not None
    if is_observed:
      previous_log_probs = jax.nn.log_softmax(self.output(carry.features).logits())
      likelihood = jnp.take_along_axis(previous_log_probs, token[:, None, None], axis=-1)[..., 0]
      carry = self.decoder.observe(carry.decoder, likelihood)
    carry, output = self.decoder.step(carry, self.embedding(token, deterministic), memory, deterministic)
    log_probs = jax.nn.log_softmax(self.output(output.features).logits())
    outputs = ModelOutput(log_mixture(output.weights, log_probs), output.weights, output.state)
    return Pending(carry, output.features) if is_observed else carry, outputs, log_probs


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The fields of `config.model` and their defaults.

  Attributes:
    encoder, decoder, output: spec strings for ENCODERS, DECODERS and OUTPUTS; their options are the fields of the
      modules there.
    embedding: features of the source and target embeddings.
    share_embeddings: one table for both sides; needs a shared vocabulary.
    dropout: on embeddings; where it is recurrent, on the memory, between layers and before the output layer; in a
      Transformer, on what every sublayer gives.
    dtype: of the computation, 'float32' or 'bfloat16'; parameters are float32.
  """

  encoder: str = 'birnn'
  decoder: str = 'bahdanau'
  output: str = 'vocabulary'
  embedding: Size = 256
  share_embeddings: bool = False
  dropout: Fraction = 0.0
  dtype: str = 'float32'


def build(model: Mapping[str, Any], source_size: int, target_size: int) -> EncoderDecoder:
  """Builds the model of `config.model`.

  Args:
    model: the group `model` of a config.
    source_size: size of the source vocabulary.
    target_size: size of the target vocabulary.

  Raises:
    UserError: for an unknown variant, option or value, and for parts that do not fit together.
  """
  options, parts = parse_model_config(model)
  if options.share_embeddings and source_size != target_size:
    raise UserError(f'share_embeddings needs a shared vocabulary, got {source_size} and {target_size} tokens')
  target = Embedding(target_size, options.embedding, **parts)
  source = target if options.share_embeddings else Embedding(source_size, options.embedding, **parts)
  encoder = make(options.encoder, ENCODERS, 'encoder', embedding=source, **parts)
  built = assemble(options, parts, model['attention'], encoder, target_size, target)
  _check_copies(options.output, built.output, built.decoder, source_size, target_size)
  return built


def parse_model_config(model: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
  """Returns the fields of `config.model`, and the arguments of all its modules: dropout and dtype."""
  options = ModelConfig(**{field.name: model[field.name] for field in dataclasses.fields(ModelConfig)})
  check_fields(options, 'config.model')
  check_fields(Attention(**model['attention']), 'config.model.attention')
  return options, {'dtype': DTYPES[choose(options.dtype, DTYPES, 'dtype')], 'dropout': options.dropout}


def assemble(
  options: ModelConfig,
  parts: Mapping[str, Any],
  attention: Mapping[str, Any],
  encoder: nn.Module,
  size: int,
  embedding: Embedding | None = None,
) -> EncoderDecoder:
  """Combines an encoder with the decoder and output layer of a config, for a target vocabulary of `size` entries."""
  embedding = embedding or Embedding(size, options.embedding, **parts)
  source_attention = Attention(**attention, dtype=parts['dtype'])
  cell_or_decoder = make(options.decoder, DECODERS, 'decoder', attention=source_attention, **parts)
  decoder = decoder_of(cell_or_decoder, options.dropout)
  output = make(options.output, OUTPUTS, 'output', size=size, embedding=embedding, dtype=parts['dtype'])
  return EncoderDecoder(encoder, decoder, embedding, output)


def _check_copies(spec: str, output: nn.Module, decoder: nn.Module, source_size: int, target_size: int) -> None:
  if not output.copies:
    return
  if source_size != target_size:
    raise UserError(f'output {spec!r} copies and needs a shared vocabulary, got {source_size} and {target_size} tokens')
  if not decoder.traits.attends:
    raise UserError(f'output {spec!r} copies by attention weights, but this decoder does not attend')
  if decoder.traits.latent:
    expected = ', '.join(name for name, cls in OUTPUTS.items() if not cls.copies)
    raise UserError(
      f'output {spec!r} copies by attention weights, but a latent alignment sums over positions; '
      f'expected one of: {expected}'
    )


def make(spec: str, table: Mapping[str, type[nn.Module]], what: str, **parts: Any) -> nn.Module:
  """Returns an instance of the class that a spec string such as 'birnn(layers=2)' selects.

  Args:
    spec: name and options of a row of `table`.
    table: flax modules by name.
    what: what the table holds, as an error names it.
    **parts: fields that the caller sets, for every class that has them. Of these only `dropout` is an option too.

  Raises:
    UserError: for an unknown name, and for options that the class does not have or that are out of range.
  """
  fixed = {'parent', 'name', 'dtype', *parts} - {'dropout'}
  _, cls, options = bind(spec, table, what, lambda cls: schema_of(cls, fixed))
  names = {field.name for field in dataclasses.fields(cls)}
  return cls(**{name: part for name, part in parts.items() if name in names} | options)
