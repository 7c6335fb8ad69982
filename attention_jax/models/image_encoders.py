"""Encoders of pictures, whose memory is the cells of a grid: IMAGE_ENCODERS, and `build_captioner`."""

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


class ImageEncoder(nn.Module):
  """Base class of encoders of pictures [B, height, width, C] with mask [B, 1], False for filler rows of a batch.

  Memory is [B, S, D], the cells of the grid row by row; `final` is their mean, as in Xu et al. 2015, section 3.1.2.

  Attributes:
    dropout: dropout rate of the memory.
    input_dtype: dtype of the pictures.
  """

  input_dtype = np.uint8
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def grid(self, pictures: jax.Array, deterministic: bool) -> jax.Array:
    """Encodes pictures [B, height, width, C] as a grid [B, rows, columns, D]."""
    raise NotImplementedError

  def cell_centres(self, size: int) -> np.ndarray:
    """Returns the centres of the cells along an axis of `size` pixels, as fractions of its length."""
    return (np.arange(size) + 0.5) / size

  @nn.compact
  def __call__(self, pictures: jax.Array, mask: jax.Array, deterministic: bool) -> Encoded:
    grid = self.grid(pictures, deterministic)
    memory = grid.reshape(len(grid), -1, grid.shape[-1])
    mask = jnp.broadcast_to(mask, memory.shape[:2])
    memory = zero_masked(Dropout(self.dropout)(memory, deterministic=deterministic), mask)
    return Encoded(memory, mask, memory.mean(1))


class Grid(ImageEncoder):
  """Convolutions of 3 x 3 with ReLU and LayerNorm, the first `halvings` of stride 2, and learned vectors of the cells.

  Attributes:
    features: features of each cell; the convolutions before the last halving have a half, a quarter, ... of them.
    halvings: number of convolutions with stride 2; odd numbers of rows and columns are rounded up.
    layers: number of further convolutions, which enlarge the receptive field of a cell.
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
    positions = self.param('place', nn.initializers.normal(0.1), (1, rows, columns, self.features))
    return x + positions.astype(self.dtype)

  def cell_centres(self, size):
    first = 0  # pixel at the centre of the receptive field of the first cell
    stride = 1  # pixels between the centres of adjacent cells
    rows = size
    for _ in range(self.halvings):
      rows_before = rows % 2  # padding 'SAME' adds a row on each side of an odd number, and one row after an even one
      first += stride * (1 - rows_before)
      stride *= 2
      rows = -(-rows // 2)
    return (first + stride * np.arange(rows) + 0.5) / size


class Precomputed(ImageEncoder):
  """Precomputed features, such as those of a pretrained network, projected to `features`.

  Attributes:
    features: features of each cell.
  """

  input_dtype = np.float32
  features: Size = 128

  def grid(self, pictures, deterministic):
    return nn.Dense(self.features, dtype=self.dtype)(pictures.astype(self.dtype))


IMAGE_ENCODERS: Mapping[str, type[nn.Module]] = {'precomputed': Precomputed, 'grid': Grid}


def build_captioner(model: Mapping[str, Any], target_size: int) -> EncoderDecoder:
  """Builds the captioning model of a config.

  Args:
    model: `config.model`, with its group `attention`.
    target_size: number of tokens in the vocabulary of the captions.

  Returns:
    The model, without parameters.

  Raises:
    UserError: for unknown names and options, and values out of range.
  """
  options, parts = parse_model_config(model)
  encoder = make(options.encoder, IMAGE_ENCODERS, 'encoder of pictures', **parts)
  return assemble(options, parts, model['attention'], encoder, target_size)
