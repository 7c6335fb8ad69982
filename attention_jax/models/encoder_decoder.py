"""The encoder-decoder, and `build`, which makes one from a config."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.latent import log_mixture
from attention_jax.functional.mask import Mask
from attention_jax.functional.masking import zero_masked
from attention_jax.models.decoders import DECODERS, decoder_of, over_steps
from attention_jax.models.encoded import DeclaresPacking, Encoded
from attention_jax.models.encoders import ENCODERS
from attention_jax.models.steps import DecoderOutput
from attention_jax.models.traits import Traits
from attention_jax.modules.attention import Attention
from attention_jax.modules.embedding import Embedding, oov_to_unk
from attention_jax.modules.outputs import OUTPUTS, CopyInputs
from attention_jax.modules.positions import segment_positions
from attention_jax.specs import Fraction, Size, bind, check_fields, schema_of
from attention_jax.tokens import BOS

DTYPES: Mapping[str, Any] = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


class ModelOutput(NamedTuple):
  """Output of a model for whole targets; outputs of one step have no axis T.

  Attributes:
    logits: logits of the next token, [B, T, V], float32. They are log-probabilities if the alignment is latent or the
      output layer copies; an output layer that copies returns [B, T, V + S], with the out-of-vocabulary words of the
      source.
    weights: attention weights, [B, T, S], averaged over heads; zeros if the decoder does not attend. Of a decoder with
      attention in every layer, those of the layer `weights_layer`.
    state: private state of the alignment after each step, [B, T, N, ...]; () if it has none, and for a decoder with
      attention in every layer.
    likelihood: log p(y_t | position s), [B, T, S], if the alignment is latent; else, and for one step, ().
    linear: factors of the logits (modules.outputs.LinearLogits); () if the logits are those of a mixture, and for one
      step.
    layers: weights of every layer and head, [B, T, L, N, S], of a decoder with attention in every layer, else ().
    ponder: Ponder [B, S] of every layer and direction of the encoder with adaptive computation time; () for one step.
  """

  logits: jax.Array
  weights: jax.Array
  state: Any = ()
  likelihood: Any = ()
  linear: Any = ()
  layers: Any = ()
  ponder: Any = ()


class SourceMemory(NamedTuple):
  """Memory of a source, prepared once for all steps.

  Attributes:
    memory: memory of the decoder.
    output_memory: memory of the output layer; () if it does not copy.
  """

  memory: Any
  output_memory: Any = ()


class LatentCarry(NamedTuple):
  """Carry of a model with a latent alignment that depends on the previous outputs.

  Attributes:
    decoder: carry of the decoder, before `observe` updates it with the likelihood of the last token.
    features: features [B, S, D] for every position; the last token was predicted from them.
  """

  decoder: Any
  features: jax.Array


def shift_right(target: jax.Array, segments: jax.Array | None = None) -> jax.Array:
  """Returns the inputs of the decoder for targets [B, T]: BOS, then all tokens but the last, in each of `segments`."""
  inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
  return inputs if segments is None else jnp.where(segment_positions(segments) == 0, BOS, inputs)


class EncoderDecoder(nn.Module):
  """An encoder-decoder model.

  Attributes:
    encoder: a module of ENCODERS or IMAGE_ENCODERS.
    decoder: a decoder, as `decoder_of` returns it.
    embedding: embedding of the target.
    output: an output layer of OUTPUTS.
  """

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
    """Whether the model can copy words of the source."""
    return self.output.copies

  @property
  def takes_masks(self) -> bool:
    """Whether the encoder has a use for a Mask of lengths in place of an array: its attention gets the lengths."""
    return isinstance(self.encoder, DeclaresPacking)

  def output_size(self, source_length: int) -> int:
    """Number of logits of a step: the vocabulary and, if the model copies, the positions of the source."""
    return self.embedding.size + source_length * self.copies

  def __call__(
    self,
    source: jax.Array,
    source_mask: jax.Array | Mask,
    target: jax.Array,
    deterministic: bool = True,
    segments: tuple[jax.Array, jax.Array] | None = None,
  ) -> ModelOutput:
    """Predicts every token of the targets from the source and the tokens before it.

    Ids V + s, for a vocabulary of V tokens, are out-of-vocabulary words of the source whose first occurrence is at
    position s.

    Args:
      source: source ids, [B, S]; pictures or precomputed features, [B, height, width, C], for an image encoder.
      source_mask: True at real positions, [B, S], or a Mask of lengths [B]; of one position for an image encoder.
      target: target ids, [B, T].
      deterministic: whether to use test-time behaviour.
      segments: of rows that hold several pairs, the number of the pair that each token belongs to, source [B, S] and
        target [B, T]: ascending from 1, then 0 for padding. `source_mask` is then an array.

    Returns:
      Outputs for all T tokens.

    Raises:
      UserError: for segments, if the model does not support them.
    """
    target_segments = ()
    if segments is not None:
      self._check_packs()
      source_segments, *target_segments = segments
      source_mask = Mask.segments(source_segments) & Mask.lengths(source_mask.sum(-1))
    encoded = self.encoder(source, source_mask, deterministic)
    inputs = shift_right(target, *target_segments)
    if self.traits.latent:
      outputs = self._sum_over_positions(encoded, inputs, oov_to_unk(target, self.embedding.size), deterministic)
      return outputs._replace(ponder=encoded.ponder)
    embeddings = self.embedding(inputs, deterministic)
    output = self.decoder(encoded, embeddings, deterministic, *target_segments)
    outputs = self._model_output(output, embeddings, self._make_output_memory(encoded, source))
    return outputs._replace(ponder=encoded.ponder)

  def _check_packs(self) -> None:
    """Raises UserError if rows of several pairs are not supported."""
    packs = {
      'encoder': isinstance(self.encoder, DeclaresPacking) and self.encoder.packs,
      'decoder': self.traits.packs,
      'output layer': not self.copies,
    }
    if not all(packs.values()):
      part = next(name for name, supported in packs.items() if not supported)
      raise UserError(
        f'data.packed must be False, because the {part} does not support rows of several pairs; expected Transformers '
        'with scores of contents alone, without recurrent attention and sinks, and an output layer that does not copy'
      )

  def start(
    self, source: jax.Array, source_mask: jax.Array | Mask, max_length: int, hypotheses: int = 1
  ) -> tuple[Any, SourceMemory]:
    """Encodes sources for decoding at test time.

    Args:
      source: as in a call.
      source_mask: as in a call.
      max_length: maximum number of steps.
      hypotheses: number of hypotheses of each source, for which every step is computed.

    Returns:
      The carry before the first step, and the memory.
    """
    encoded = self.encoder(source, source_mask, True)
    carry, memory = self._start(encoded, max_length)
    memory = self.decoder.share(memory, hypotheses, max_length)
    return carry, SourceMemory(memory, self._make_output_memory(encoded, source))

  def step(self, carry: Any, token: jax.Array, memory: SourceMemory) -> tuple[Any, ModelOutput]:
    """Computes one step at test time.

    Args:
      carry: carry of the previous step.
      token: ids of the previous tokens, [B].
      memory: memory, as `start` returns it.

    Returns:
      The next carry, and outputs for the next token: logits [B, V], or [B, V + S] if the model copies, and weights
      [B, S].
    """
    if self.traits.latent:
      carry, outputs, _ = self._latent_step(carry, token, memory.memory, True)
      return carry, outputs
    embedding = self.embedding(token)
    carry, output = self.decoder.step(carry, embedding, memory.memory)
    return carry, self._model_output(output, embedding, memory.output_memory)._replace(linear=())

  def posterior(self, outputs: ModelOutput, target_mask: jax.Array) -> jax.Array:
    """Returns the alignment given the whole target, [B, T, S].

    Args:
      outputs: outputs for the whole target.
      target_mask: True at real tokens, [B, T]; masked tokens do not affect the result.

    Returns:
      Posterior weights of a latent alignment; of other alignments, the weights themselves.
    """
    latent = self.traits.latent
    if not latent:
      return outputs.weights
    state_of_head = jax.tree.map(lambda x: x[:, :, 0], outputs.state)  # latent alignments have one head
    likelihood = jnp.where(target_mask[..., None], outputs.likelihood, 0.0)
    return zero_masked(jax.vmap(latent.posterior)(outputs.weights, state_of_head, likelihood), target_mask)

  def _make_output_memory(self, encoded: Encoded, source: jax.Array) -> Any:
    """Memory of the output layer."""
    return self.output.remember(encoded.memory, encoded.mask, source)

  def _model_output(self, output: DecoderOutput, embeddings: jax.Array, output_memory: Any) -> ModelOutput:
    """Outputs of one step or of all, from the output and the inputs of the decoder."""
    candidates = (output.context, output.top, embeddings)
    # `context` is () for a LayeredDecoder, which has one context per layer.
    gate_inputs = tuple(candidate for candidate in candidates if not isinstance(candidate, tuple))
    result = self.output(output.features, CopyInputs(output_memory, output.weights, gate_inputs))
    return ModelOutput(result.logits(), output.weights, output.state, linear=result.linear, layers=output.layers)

  def _start(self, encoded: Encoded, max_length: int) -> tuple[Any, Any]:
    carry, memory = self.decoder.start(encoded, max_length)
    latent = self.traits.latent
    if latent and latent.observe:
      # The first step observes BOS. Its likelihood has no effect, because the position before that step is fixed.
      cell = self.decoder.cell
      carry = LatentCarry(carry, jnp.zeros((*encoded.mask.shape, cell.width), cell.dtype))
    return carry, memory

  def _sum_over_positions(
    self, encoded: Encoded, inputs: jax.Array, target: jax.Array, deterministic: bool
  ) -> ModelOutput:
    """Outputs of all steps of a latent alignment; the log-probabilities [B, S, V] exist for one step at a time."""
    carry, memory = self._start(encoded, target.shape[1])

    def step(model, carry, tokens):
      input_token, target_token = tokens
      carry, outputs, log_probs = model._latent_step(carry, input_token, memory, deterministic)
      likelihood = jnp.take_along_axis(log_probs, target_token[:, None, None], axis=-1)[..., 0]
      return carry, outputs._replace(likelihood=likelihood)

    _, outputs = over_steps(step, self)(self, carry, (inputs, target))
    return outputs

  def _latent_step(self, carry: Any, token: jax.Array, memory: Any, deterministic: bool):
    """Returns the next carry, the outputs, and log p(y | position s), [B, S, V]."""
    is_observed = self.traits.latent.observe is not None
    if is_observed:
      previous_log_probs = jax.nn.log_softmax(self.output(carry.features).logits())
      known_token = oov_to_unk(token, previous_log_probs.shape[-1])
      likelihood = jnp.take_along_axis(previous_log_probs, known_token[:, None, None], axis=-1)[..., 0]
      carry = self.decoder.observe(carry.decoder, likelihood)
    embedding = self.embedding(token, deterministic)
    carry, output = self.decoder.step(carry, embedding, memory, deterministic)
    log_probs = jax.nn.log_softmax(self.output(output.features).logits())
    outputs = ModelOutput(log_mixture(output.weights, log_probs), output.weights, output.state)
    return LatentCarry(carry, output.features) if is_observed else carry, outputs, log_probs


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Fields of `config.model` and their defaults.

  Attributes:
    encoder: spec of ENCODERS, or of IMAGE_ENCODERS for pictures; its options are the fields of the module.
    decoder: spec of DECODERS; its options are the fields of the module.
    output: spec of OUTPUTS; its options are the fields of the module.
    embedding: features of the source and target embeddings.
    share_embeddings: whether source and target share the embeddings, which requires a shared vocabulary.
    dropout: dropout rate of embeddings; in recurrent models also of the memory, between layers and before the output
      layer; in Transformers also of the results of sublayers; in convolutional models also of the inputs of layers and
      before the output layer.
    dtype: dtype of the computation, 'float32' or 'bfloat16'; parameters are float32.
    attention: the attention of the decoder.
  """

  encoder: str = 'birnn'
  decoder: str = 'bahdanau'
  output: str = 'vocabulary'
  embedding: Size = 256
  share_embeddings: bool = False
  dropout: Fraction = 0.0
  dtype: str = 'float32'
  attention: Attention = dataclasses.field(default_factory=Attention)

  def __post_init__(self):
    check_fields(self, 'config.model')
    check_fields(self.attention, 'config.model.attention')

  @property
  def shared_fields(self) -> dict[str, Any]:
    """The fields that all modules of the model share. Raises UserError for an unknown dtype."""
    return {'dtype': DTYPES[choose(self.dtype, DTYPES, 'dtype')], 'dropout': self.dropout}


def build(config: ModelConfig, source_size: int, target_size: int) -> EncoderDecoder:
  """Builds the model of a config.

  Args:
    config: the group `model` of the config.
    source_size: number of tokens in the source vocabulary.
    target_size: number of tokens in the target vocabulary.

  Returns:
    The model, without parameters.

  Raises:
    UserError: for unknown names and options, values out of range, and options that contradict each other.
  """
  shared_fields = config.shared_fields
  if config.share_embeddings and source_size != target_size:
    raise UserError(f'share_embeddings needs a shared vocabulary, got {source_size} and {target_size} tokens')
  target_embedding = Embedding(target_size, config.embedding, **shared_fields)
  source_embedding = target_embedding
  if not config.share_embeddings:
    source_embedding = Embedding(source_size, config.embedding, **shared_fields)
  encoder = make_module(config.encoder, ENCODERS, 'encoder', embedding=source_embedding, **shared_fields)
  encoder_decoder = assemble(config, encoder, target_size, target_embedding)
  _check_copies(config.output, encoder_decoder, source_size, target_size)
  return encoder_decoder


def assemble(config: ModelConfig, encoder: nn.Module, size: int, embedding: Embedding | None = None) -> EncoderDecoder:
  """Combines an encoder with the decoder and the output layer of a config.

  Args:
    config: the group `model` of the config.
    encoder: the encoder.
    size: number of tokens in the target vocabulary.
    embedding: embedding of the target; by default a new one.
  """
  shared_fields = config.shared_fields
  embedding = embedding or Embedding(size, config.embedding, **shared_fields)
  attention = config.attention.clone(dtype=shared_fields['dtype'])
  decoder_module = make_module(
    config.decoder, DECODERS, 'decoder', attention=attention, layer_attentions=(), **shared_fields
  )
  decoder = decoder_of(decoder_module, config.dropout)
  output = make_module(config.output, OUTPUTS, 'output', size=size, embedding=embedding, dtype=shared_fields['dtype'])
  return EncoderDecoder(encoder, decoder, embedding, output)


def _check_copies(spec: str, model: EncoderDecoder, source_size: int, target_size: int) -> None:
  """Raises UserError if the output layer copies but the model does not support it."""
  if not model.copies:
    return
  if source_size != target_size:
    raise UserError(f'output {spec!r} copies and needs a shared vocabulary, got {source_size} and {target_size} tokens')
  expected = ', '.join(name for name, cls in OUTPUTS.items() if not cls.copies)
  if not model.traits.attends:
    raise UserError(
      f'output {spec!r} copies from the source, but this decoder does not attend to it; '
      f'expected a decoder that attends, or one of the outputs: {expected}'
    )
  if model.traits.latent:
    raise UserError(
      f'output {spec!r} copies from the source, which is not supported for a latent alignment; '
      f'expected one of: {expected}'
    )


def make_module(spec: str, table: Mapping[str, type[nn.Module]], kind: str, **fields: Any) -> nn.Module:
  """Returns an instance of the class that a spec string such as 'birnn(layers=2)' selects.

  Args:
    spec: name and options of a row of `table`.
    table: flax modules by name.
    kind: the kind of entry, for error messages.
    **fields: values of fields, for every class that has them. Of these fields, only `dropout` may be set in `spec` too.

  Raises:
    UserError: for a spec that cannot be parsed, an unknown name, and options that the class does not have or that are
      out of range.
  """
  fixed = {'parent', 'name', 'dtype', *fields} - {'dropout'}
  _, cls, options = bind(spec, table, kind, lambda cls: schema_of(cls, fixed))
  names = {field.name for field in dataclasses.fields(cls)}
  return cls(**{name: value for name, value in fields.items() if name in names} | options)


def replace_unreachable_targets(model, batch):
  """Returns the batch with UNK in place of target ids from `model.output_size` on, which the model cannot emit.

  Without copying, `output_size` is V, and the ids from V on are out-of-vocabulary words of the source. With copying, it
  is V + S, so that no id is replaced.
  """
  return batch._replace(target=oov_to_unk(batch.target, model.output_size(batch.source.shape[-1])))
