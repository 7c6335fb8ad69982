"""The encoder-decoder, and `build`: from a config to a model."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from attention_jax.errors import UserError, choose
from attention_jax.functional.table import check_option, parse_spec
from attention_jax.models.cells import CELLS
from attention_jax.models.decoders import Decoder
from attention_jax.models.encoders import DIRECTIONS, ENCODERS
from attention_jax.modules.attention import Attention
from attention_jax.modules.embedding import Embedding
from attention_jax.modules.outputs import OUTPUTS

DTYPES: Mapping[str, Any] = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


class Outputs(NamedTuple):
  """Logits [B, T, vocabulary] float32, and the weights [B, T, S] they were made with."""

  logits: jax.Array
  weights: jax.Array


class EncoderDecoder(nn.Module):
  """An encoder, a decoder, target embeddings and an output layer."""

  encoder: nn.Module
  decoder: nn.Module
  embedding: nn.Module
  output: nn.Module
  dropout: float = 0.0

  def setup(self):
    self.drop = nn.Dropout(self.dropout)

  def __call__(
    self, source: jax.Array, source_mask: jax.Array, target_in: jax.Array, deterministic: bool = True
  ) -> Outputs:
    """source [B, S] ids, source_mask [B, S], target_in [B, T] ids (shifted right, BOS first) -> Outputs."""
    encoded = self.encoder(source, source_mask, deterministic)
    features, _, weights = self.decoder(encoded, self.embedding(target_in, deterministic), deterministic)
    return Outputs(self.output(self.drop(features, deterministic=deterministic)), weights)

  def start(self, source: jax.Array, source_mask: jax.Array) -> tuple[Any, Any]:
    """The first carry and the memory, at test time."""
    return self.decoder.start(self.encoder(source, source_mask, True))

  def step(self, carry: Any, token: jax.Array, memory: Any) -> tuple[Any, Outputs]:
    """token [B] ids -> the next carry, and Outputs for the token after it: logits [B, vocabulary], weights [B, S]."""
    carry, output = self.decoder.step(carry, self.embedding(token), memory)
    return carry, Outputs(self.output(output.features), output.weights)


@dataclasses.dataclass(frozen=True)
class Model:
  """The fields of `config.model` and their defaults.

  Attributes:
    encoder, decoder, output: spec strings for ENCODERS, CELLS and OUTPUTS; their options are the fields of the
      modules there.
    embedding: features of the source and target embeddings.
    share_embeddings: one table for both sides; needs a shared vocabulary.
    dropout: on embeddings, on the memory, between recurrent layers and before the output layer.
    dtype: of the computation, 'float32' or 'bfloat16'; parameters are float32.
  """

  encoder: str = 'birnn'
  decoder: str = 'bahdanau'
  output: str = 'vocabulary'
  embedding: int = 256
  share_embeddings: bool = False
  dropout: float = 0.0
  dtype: str = 'float32'


def build(model: Mapping[str, Any], source_size: int, target_size: int) -> EncoderDecoder:
  """The model that `config.model` means, for vocabularies of these sizes. Raises UserError for what does not exist."""
  options = {field.name: model[field.name] for field in dataclasses.fields(Model)}
  options = Model(**options)
  parts = {'dtype': DTYPES[choose(options.dtype, DTYPES, 'dtype')], 'dropout': options.dropout}
  if options.share_embeddings and source_size != target_size:
    raise UserError(f'share_embeddings needs a shared vocabulary; got {source_size} and {target_size} tokens')
  for name, value in {**dataclasses.asdict(options), **model['attention']}.items():
    _check_range('model', name, value)
  attention = Attention(**model['attention'], dtype=parts['dtype'])
  target = Embedding(target_size, options.embedding, **parts)
  source = target if options.share_embeddings else Embedding(source_size, options.embedding, **parts)
  encoder = make(options.encoder, ENCODERS, 'encoder', embedding=source, **parts)
  choose(encoder.direction, DIRECTIONS, 'direction')
  cell = make(options.decoder, CELLS, 'decoder', attention=attention, **parts)
  output = make(options.output, OUTPUTS, 'output', size=target_size, embedding=target, dtype=parts['dtype'])
  return EncoderDecoder(encoder, Decoder(cell), target, output, options.dropout)


def make(spec: str, table: Mapping[str, type[nn.Module]], what: str, **parts: Any) -> nn.Module:
  """An instance of the class that `spec` names: 'birnn(layers=2)'. `parts` are not options but given by the caller."""
  name, given = parse_spec(spec)
  cls = table[choose(name, table, what)]
  fields = {f.name: f for f in dataclasses.fields(cls)}
  possible = {n for n in fields if n not in ('parent', 'name', *parts)} | {'dropout'} & set(fields)
  for option, value in given.items():
    choose(option, possible, f'option of {what} {name!r}:')
    check_option(f'{what} {name!r}', option, value, fields[option].default)
    _check_range(f'{what} {name!r}', option, value)
  return cls(**(parts | given))


def _check_range(what: str, option: str, value: Any) -> None:
  if type(value) is int and value < 1:
    raise UserError(f'{what}: {option} is {value}; possible: 1 or more')
  if option == 'dropout' and not 0 <= value < 1:
    raise UserError(f'{what}: dropout is {value}; possible: from 0 to below 1')
