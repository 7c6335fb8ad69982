"""Features of images by a pretrained network, as grids for the task `captions(features=...)`."""

import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.atomic import write_atomic
from attention_jax.errors import UserError
from attention_jax.systems.captioning.images import IMAGE_EXTENSIONS, read_image

Network = Callable[[np.ndarray], np.ndarray]  # pictures [B, size, size, 3] uint8 -> [B, rows, columns, C]
DEFAULT_INPUT_SIZE = 224  # pixels, of most image models


def write_features(
  path: str | Path,
  folder: str | Path,
  names: Sequence[str],
  network: Network,
  *,
  size: int,
  batch: int = 32,
  on_batch: Callable[[int], None] = lambda count: None,
) -> tuple[int, ...]:
  """Writes an .npz file with the grid [rows, columns, C] of every image by its name, float16. The write is atomic.

  Args:
    path: the file to write.
    folder: the folder of the images.
    names: the names of the images.
    network: computes the grids.
    size: height and width to which the central square of each image is scaled, pixels.
    batch: number of images of a batch.
    on_batch: called with the number of images of each batch.

  Returns:
    The shape of a grid.

  Raises:
    UserError: if there are no images, if one cannot be read, for grids that are not [rows, columns, C] of one shape,
      for features that are not finite or too large for float16, and if the file cannot be written.
  """
  if not names:
    raise UserError(f'{folder}: no images; expected files that end with one of: {", ".join(IMAGE_EXTENSIONS)}')
  shape = ()
  try:
    with write_atomic(path) as temporary, zipfile.ZipFile(temporary, 'w') as file:
      for start in range(0, len(names), batch):
        batch_names = names[start : start + batch]
        grids = network(np.stack([read_image(os.path.join(folder, name), size) for name in batch_names]))
        if grids.ndim != 4 or len(grids) != len(batch_names):
          expected = f'[{len(batch_names)}, rows, columns, features]'
          raise UserError(f'the network must return {expected}, got {list(grids.shape)}')
        shape = shape or grids.shape[1:]
        if grids.shape[1:] != shape:
          raise UserError(f'all grids must have the shape {list(shape)} of the first, got {list(grids.shape[1:])}')
        for name, grid in zip(batch_names, grids, strict=True):
          with file.open(f'{name}.npy', 'w', force_zip64=True) as entry:
            np.lib.format.write_array(entry, _to_float16(grid, name))
        on_batch(len(batch_names))
  except OSError as error:
    raise UserError(f'{path}: cannot be written ({error.strerror or error})') from error
  return shape


def _to_float16(grid: np.ndarray, name: str) -> np.ndarray:
  """The features of an image in half the memory. Raises UserError if they are not finite, or too large."""
  with np.errstate(over='ignore'):
    numbers = np.ascontiguousarray(grid, np.float16)
  if not np.isfinite(numbers).all():
    expected = f'finite numbers from {np.finfo(np.float16).min:.0f} to {np.finfo(np.float16).max:.0f}'
    raise UserError(f'{name}: features must be {expected}, got {np.min(grid):g} to {np.max(grid):g}')
  return numbers


def load_pretrained(name: str) -> tuple[Network, int]:
  """Loads an image model of the package transformers: ResNet, ConvNeXt, Swin, ViT, DINOv2 and others.

  With the package timm installed, its models are available too. The grid of a vision transformer is that of its patch
  tokens.

  Args:
    name: a name at Hugging Face, or the folder that the model was saved to; '~' stands for the home folder.

  Returns:
    The network, and the side of its input images in pixels, see `input_size`.

  Raises:
    UserError: if PyTorch or transformers are not installed, and for a model that cannot be loaded.
  """
  try:
    import torch
    from transformers import AutoImageProcessor, AutoModel
  except ImportError as error:
    raise UserError(f'{error.name} is not installed; run pip install torch transformers') from error
  path = os.path.expanduser(name)
  try:
    model = AutoModel.from_pretrained(path).float().eval()  # some are stored, and therefore loaded, in 16 bits
    processor = AutoImageProcessor.from_pretrained(path)
  except Exception as error:  # damaged files raise exceptions of the library that reads them
    raise UserError(
      f'{name}: cannot be loaded as an image model of transformers ({" ".join(str(error).split())})'
    ) from error
  model = getattr(model, 'vision_model', model)  # the image part of models of images and texts

  def network(pictures: np.ndarray) -> np.ndarray:
    scaled = scale_pixels(pictures, processor)
    inputs = torch.from_numpy(scaled.transpose(0, 3, 1, 2).copy())
    try:
      with torch.inference_mode():
        outputs = model(pixel_values=inputs).last_hidden_state.numpy()
    except (RuntimeError, ValueError) as error:
      reason = ' '.join(str(error).split())[:160]
      raise UserError(f'{name}: cannot process pictures of {pictures.shape[1:3]} pixels ({reason})') from error
    return outputs.transpose(0, 2, 3, 1) if outputs.ndim == 4 else patch_grid(outputs)

  return network, input_size(processor)


def scale_pixels(pictures: np.ndarray, processor: Any) -> np.ndarray:
  """Returns pixels [B, H, W, 3] uint8 / 255, normalised as by an image processor of transformers, float32."""
  scaled = pictures.astype(np.float32) / 255
  if getattr(processor, 'do_normalize', True):
    mean = np.array(getattr(processor, 'image_mean', None) or 0.0, np.float32)
    scaled = (scaled - mean) / np.array(getattr(processor, 'image_std', None) or 1.0, np.float32)
  # The channels of some networks, such as MobileViT, are blue, green and red.
  return scaled[..., ::-1] if getattr(processor, 'do_flip_channel_order', False) else scaled


def input_size(processor: Any) -> int:
  """Returns the side of the input of an image processor of transformers, pixels.

  It is that of its crop, else of its resizing, else DEFAULT_INPUT_SIZE.
  """
  for sizes in (getattr(processor, 'crop_size', None), getattr(processor, 'size', None)):
    for key in ('height', 'shortest_edge'):
      if sizes and key in sizes:
        return int(sizes[key])
  return DEFAULT_INPUT_SIZE


def patch_grid(tokens: np.ndarray) -> np.ndarray:
  """Returns the patch tokens of a vision transformer, which are its last ones: [B, N, C] -> [B, rows, rows, C]."""
  rows = int(tokens.shape[1] ** 0.5)
  return tokens[:, tokens.shape[1] - rows * rows :].reshape(len(tokens), rows, rows, -1)
