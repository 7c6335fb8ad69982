"""Encoders of pictures: from a picture to a memory of the cells of a grid. IMAGE_ENCODERS, and `build_captioner`."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.masking import zero_masked
from attention_jax.models.encoded import Encoded
from attention_jax.models.encoder_decoder import EncoderDecoder, assemble, make, parse_model_config
from attention_jax.modules.dropout import Dropout
from attention_jax.specs import Count, Fraction, Size


class _Image(nn.Module):
  """What encoders of pictures share: pictures [B, height, width, C], mask [B, 1], True = real -> Encoded.

  Memory is [B, S, D], the cells of the grid row by row; `final` is their mean, as in Xu et al. 2015, section 3.1.2.
  `input_dtype` is the dtype of its pictures.
  """

  input_dtype = np.uint8
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def grid(self, pictures: jax.Array, deterministic: bool) -> jax.Array:
    """[B, height, width, C] -> [B, rows, columns, D]."""
    raise NotImplementedError

  def cell_centres(self, size: int) -> np.ndarray:
    """[rows]: what each row of cells is centred on, from 0 to 1 along an axis of `size`; columns alike."""
    return (np.arange(size) + 0.5) / size

  @nn.compact
  def __call__(self, pictures: jax.Array, mask: jax.Array, deterministic: bool) -> Encoded:
    grid = self.grid(pictures, deterministic)
    memory = grid.reshape(len(grid), -1, grid.shape[-1])
    mask = jnp.broadcast_to(mask, memory.shape[:2])
    memory = zero_masked(Dropout(self.dropout)(memory, deterministic=deterministic), mask)
    return Encoded(memory, mask, memory.mean(1))


class Grid(_Image):
  """Convolutions of 3 x 3, the first `halvings` of which halve the grid; ReLU and LayerNorm after each; places told.

  Attributes:
    features: of each cell; the first convolutions have half as many, a quarter, ...
    halvings: how often rows and columns are halved; an odd number of them becomes the larger half.
    layers: convolutions after that; without any, a cell has seen little but itself.
  """

  features: Size = 128
  halvings: Size = 3
  layers: Count = 0

  def grid(self, pictures, deterministic):
    x = pictures.astype(self.dtype) / 127.5 - 1
    for layer in range(self.halvings + self.layers):
      halves = layer < self.halvings
      features = max(1, self.features >> max(0, self.halvings - 1 - layer))
      x = nn.Conv(features, (3, 3), strides=2 if halves else 1, dtype=self.dtype)(x)
      x = nn.LayerNorm(dtype=self.dtype)(nn.relu(x))
    _, rows, columns, _ = x.shape
    place = self.param('place', nn.initializers.normal(0.1), (1, rows, columns, self.features))
    return x + place.astype(self.dtype)

  def cell_centres(self, size):
    first, apart, rows = 0, 1, size  # the pixel in the middle of what the first cell sees, and from cell to cell
    for _ in range(self.halvings):
      before = rows % 2  # of the rows that padding 'SAME' adds: two around an odd number, one after an even one
      first, apart, rows = first + apart * (1 - before), 2 * apart, -(-rows // 2)
    return (first + apart * np.arange(rows) + 0.5) / size


class Precomputed(_Image):
  """Features that somebody else has computed, such as those of a pretrained network, projected to `features`.

  Attributes: features, of each cell.
  """

  input_dtype = np.float32
  features: Size = 128

  def grid(self, pictures, deterministic):
    return nn.Dense(self.features, dtype=self.dtype)(pictures.astype(self.dtype))


IMAGE_ENCODERS: Mapping[str, type[nn.Module]] = {'precomputed': Precomputed, 'grid': Grid}


def build_captioner(model: Mapping[str, Any], target_size: int) -> EncoderDecoder:
  """The model that `config.model` means, for captions of so many words. Raises UserError for what does not exist."""
  options, parts = parse_model_config(model)
  encoder = make(options.encoder, IMAGE_ENCODERS, 'encoder of pictures', **parts)
  return assemble(options, parts, model['attention'], encoder, target_size)
