"""Image files: names in a folder, and pixels scaled to a square."""

import math
import os

import numpy as np

from attention_jax.data.files import open_file
from attention_jax.data.urls import is_url, list_url
from attention_jax.errors import UserError

IMAGE_EXTENSIONS = ('.bmp', '.gif', '.jpeg', '.jpg', '.png', '.tif', '.tiff', '.webp')


def list_images(folder: str | os.PathLike) -> list[str]:
  """Returns the names in a folder that have one of IMAGE_EXTENSIONS, sorted.

  Args:
    folder: the folder, on a disk or behind a URL; '~' stands for the home folder.

  Raises:
    UserError: for a folder that cannot be read.
  """
  try:
    names = list_url(str(folder)) if is_url(str(folder)) else os.listdir(os.path.expanduser(folder))
    return sorted(name for name in names if name.lower().endswith(IMAGE_EXTENSIONS))
  except OSError as error:
    raise UserError(f'{folder}: cannot be read ({error.strerror})') from error
  except ValueError as error:
    raise UserError(f'{str(folder)!r}: cannot be read ({error})') from error


def read_image(path: str, size: int, error_prefix: str = '', max_upscale: float = 4.0) -> np.ndarray:
  """Returns the central square of an image, scaled, on white where the image is transparent.

  Args:
    path: the file, on a disk or behind a URL.
    size: height and width of the result, pixels.
    error_prefix: prefix of error messages, such as 'captions.csv:3: '.
    max_upscale: the largest factor by which the image may be enlarged.

  Returns:
    uint8 [size, size, 3].

  Raises:
    UserError: for a file that cannot be read as an image, for an image that is too small, and for float pixels.
  """
  from PIL import Image, ImageOps

  try:
    file = open_file(path)
  except UserError as error:
    raise UserError(f'{error_prefix}{error}') from error
  except FileNotFoundError as error:
    raise UserError(f'{error_prefix}{path}: no such file') from error
  except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
    raise UserError(f'{error_prefix}{path}: cannot be read as an image ({error})') from error
  try:
    with file, Image.open(file) as image:
      if min(image.size) * max_upscale < size:
        min_side = math.ceil(size / max_upscale)
        got = f'{image.width} x {image.height}'
        raise UserError(
          f'{error_prefix}{path}: each side must be at least {min_side} pixels for size={size}, got {got}'
        )
      if image.mode == 'F':  # the level that is white is unknown
        raise UserError(f'{error_prefix}{path}: pixels must be whole numbers, got floats')
      return np.asarray(ImageOps.fit(_to_rgb(ImageOps.exif_transpose(image)), (size, size)), np.uint8)
  except UserError:
    raise
  except Exception as error:  # the readers of image formats raise many kinds of exceptions
    raise UserError(f'{error_prefix}{path}: cannot be read as an image ({" ".join(str(error).split())})') from error


def _to_rgb(image):
  """An image as opaque 8-bit RGB. PIL alone would clip 16-bit grey levels to white and show transparent colours."""
  from PIL import Image

  if image.mode.startswith('I'):
    image = _to_8_bits(image)
  if image.has_transparency_data:
    return Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA')).convert('RGB')
  return image.convert('RGB')


def _to_8_bits(image):
  """16-bit grey levels as 8-bit ones, with an alpha channel if the file declares one 16-bit level transparent."""
  from PIL import Image

  grey = image.point(lambda level: level / 256).convert('L')
  transparent_level = grey.info.pop('transparency', None)
  if transparent_level is not None:
    is_opaque = np.asarray(image) != transparent_level
    grey.putalpha(Image.fromarray(255 * is_opaque.astype(np.uint8)))
  return grey
