"""Image encoders, which map an image to a memory of grid cells: IMAGE_ENCODERS, and `build_captioner`."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.mask import Mask, positions_of
from attention_jax.functional.masking import zero_masked
from attention_jax.models.encoded import Encoded
from attention_jax.models.encoder_decoder import EncoderDecoder, ModelConfig, assemble, make_module
from attention_jax.modules.convolution import Conv
from attention_jax.modules.dropout import Dropout
from attention_jax.modules.linear import Dense
from attention_jax.specs import Count, Fraction, Size


class ImageEncoder(nn.Module):
  """Base class of image encoders: pictures [B, height, width, C], mask [B, 1], False for filler rows -> Encoded.

  The memory [B, S, D] holds the cells of the grid row by row; `final` is their mean, as in Xu et al. 2015, section
  3.1.2. The class attribute `input_dtype` is the dtype of the pictures.

  Attributes:
    dropout: rate on the memory.
    dtype: dtype of the computation.
  """

  input_dtype = np.uint8
  dropout: Fraction = 0.0
  dtype: jnp.dtype = jnp.float32

  def grid(self, pictures: jax.Array, deterministic: bool) -> jax.Array:
    """Computes the cells [B, rows, columns, D] of pictures [B, height, width, C]."""
    raise NotImplementedError

  def cell_centres(self, size: int) -> np.ndarray:
    """Returns the centre of each cell along an axis of `size` pixels, from 0 to 1: [rows] or [columns]."""
    return (np.arange(size) + 0.5) / size

  @nn.compact
  def __call__(self, pictures: jax.Array, mask: jax.Array | Mask, deterministic: bool) -> Encoded:
    grid = self.grid(pictures, deterministic)
    memory = grid.reshape(len(grid), -1, grid.shape[-1])
    mask = jnp.broadcast_to(positions_of(mask, 1), memory.shape[:2])
    memory = zero_masked(Dropout(self.dropout)(memory, deterministic=deterministic), mask)
    return Encoded(memory, mask, memory.mean(1))


class Grid(ImageEncoder):
  """3 x 3 convolutions, each followed by ReLU and LayerNorm, plus learned position embeddings.

  The first `halvings` convolutions have stride 2.

  Attributes as in ImageEncoder, and:
    features: width of each cell, D. Each convolution of stride 2 has half as many features as the next one (rounded
      down, at least 1), except the last one, which has D like those of stride 1.
    halvings: number of convolutions of stride 2, each of which halves the size of the grid, rounded up.
    layers: number of convolutions of stride 1 after them, which enlarge the receptive field of each cell.
  """

  features: Size = 128
  halvings: Size = 3
  layers: Count = 0

  def grid(self, pictures, deterministic):
    x = pictures.astype(self.dtype) / 127.5 - 1
    for layer in range(self.halvings + self.layers):
      strides = 2 if layer < self.halvings else 1
      features = max(1, self.features >> max(0, self.halvings - 1 - layer))
      x = Conv(features, (3, 3), strides=strides, dtype=self.dtype)(x)
      x = nn.LayerNorm(dtype=self.dtype)(nn.relu(x))
    _, rows, columns, _ = x.shape
    positions = self.param('place', nn.initializers.normal(0.1), (1, rows, columns, self.features))
    return x + positions.astype(self.dtype)

  def cell_centres(self, size):
    first = 0  # the pixel at the centre of the first cell's receptive field
    spacing = 1  # pixels from cell to cell
    rows = size
    for _ in range(self.halvings):
      # Padding 'SAME' adds a row before and a row after an odd number of rows, but only a row after an even number.
      padding_before = rows % 2
      first += spacing * (1 - padding_before)
      spacing *= 2
      rows = -(-rows // 2)
    return (first + spacing * np.arange(rows) + 0.5) / size


class Precomputed(ImageEncoder):
  """Linear projection of precomputed features, such as those of a pretrained network.

  Attributes as in ImageEncoder, and:
    features: width of each cell, D.
  """

  input_dtype = np.float32
  features: Size = 128

  def grid(self, pictures, deterministic):
    return Dense(self.features, dtype=self.dtype)(pictures.astype(self.dtype))


IMAGE_ENCODERS: Mapping[str, type[nn.Module]] = {'precomputed': Precomputed, 'grid': Grid}


def build_captioner(config: ModelConfig, target_size: int) -> EncoderDecoder:
  """Builds the captioning model that `config.model` describes.

  Args:
    config: the group `model` of the config.
    target_size: size of the vocabulary of the captions.

  Returns:
    An EncoderDecoder without parameters.

  Raises:
    UserError: if a field, a spec or an option is unknown or out of range.
  """
  encoder = make_module(config.encoder, IMAGE_ENCODERS, 'encoder of pictures', **config.shared_fields)
  return assemble(config, encoder, target_size)
