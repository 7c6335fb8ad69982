"""Encoder-decoders of a few numbers, with a different size on every axis where the formulas allow it."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from attention_jax.models.encoder_decoder import EncoderDecoder, ModelConfig, build
from attention_jax.specs import parse

B, T, S = 3, 5, 7
SOURCE_WORDS, TARGET_WORDS = 11, 13
EMBEDDING, ENCODED, STATE, READOUT, FEATURES = 4, 10, 8, 9, 6
FORWARD_ENCODER = f'rnn(rnn="gru", features={ENCODED})'
LENGTHS = np.array([S, 4, 2])
# One head of these compares states and memory as they are, so that both must have one width.
EQUAL_WIDTH_SCORES = ('dot', 'scaled_dot', 'cosine')


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
  """The model of a config with these fields; `options` are the cell's own, as in 'layers=2, rnn="gru"'."""
  state = ENCODED if score in EQUAL_WIDTH_SCORES and heads == 1 and cell != 'plain' else STATE
  own = [f'features={state}', *([f'readout={READOUT}'] if cell == 'bahdanau' else []), *([options] if options else [])]
  attention = {'score': score, 'alignment': alignment, 'features': FEATURES, 'heads': heads}
  decoder = f'{cell}({", ".join(own)})'
  config = dataclasses.asdict(ModelConfig(encoder, decoder, embedding=EMBEDDING)) | fields
  return build(config | {'attention': attention}, *sizes)


def build_streaming(
  cell: str = 'luong',
  options: str = 'rnn="gru"',
  encoder: str = FORWARD_ENCODER,
  score='additive',
  alignment: str = 'monotonic',
  **fields,
) -> EncoderDecoder:
  """One that can follow its source."""
  return build_tiny(cell, f'{options}, bridge=False', encoder=encoder, score=score, alignment=alignment, **fields)


def inputs(seed: int = 0, lengths=LENGTHS, steps: int = T, sizes=(SOURCE_WORDS, TARGET_WORDS)):
  """source [B, S], source_mask [B, S] of these lengths, target [B, T]."""
  random = np.random.default_rng(seed)
  size = max(lengths)
  source = random.integers(3, sizes[0], (len(lengths), size), dtype=np.int32)
  target = random.integers(3, sizes[1], (len(lengths), steps), dtype=np.int32)
  mask = np.arange(size) < np.asarray(lengths)[:, None]
  return jnp.asarray(source), jnp.asarray(mask), jnp.asarray(target)


TRANSFORMER_FEATURES = 8  # features of a Transformer, which adds what goes in to what comes out


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
  """Two layers a side; `encoder` and `decoder` are options of each, what stands there last counts."""
  base = {'features': TRANSFORMER_FEATURES, 'layers': 2, 'heads': 4, 'hidden': 10}
  of = lambda more: f'transformer({", ".join(f"{k}={v!r}" for k, v in (base | _options(more)).items())})'
  config = (
    dataclasses.asdict(
      ModelConfig(encoder_spec or of(encoder), decoder_spec or of(decoder), embedding=TRANSFORMER_FEATURES)
    )
    | fields
  )
  attention = {'score': score, 'alignment': alignment, 'features': features, 'heads': heads}
  return build(config | {'attention': attention}, *sizes)


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
  """Two layers of convolutions a side; `encoder` and `decoder` are more options of each."""
  encoder = encoder_spec or f'conv(features=5, layers=2{encoder and ", " + encoder})'
  decoder = decoder_spec or f'conv(features=6, layers=2{decoder and ", " + decoder})'
  config = dataclasses.asdict(ModelConfig(encoder, decoder, embedding=EMBEDDING)) | fields
  attention = {'score': score, 'alignment': alignment, 'features': 8, 'heads': heads}
  return build(config | {'attention': attention}, *sizes)


def _options(more: str) -> dict:
  return parse(f'options({more})')[1] if more else {}
