"""Pictures of a trained run as one HTML page that needs no network: they are embedded in it."""

import base64
from collections.abc import Sequence
from pathlib import Path

from attention_jax.analysis.picture_files import report_write_errors
from attention_jax.analysis.reading_page import TEMPLATES
from attention_jax.atomic import write_text
from attention_jax.errors import choose

MEDIA_TYPES = {'.png': 'image/png', '.gif': 'image/gif'}


def write_picture_page(pictures: Sequence[Path], path: str | Path, title: str, description: str) -> None:
  """Writes one page with picture files, one below the other.

  Args:
    pictures: files that end with one of MEDIA_TYPES.
    path: the page.
    title: heading.
    description: what the pictures show, which is also their text for readers that show no pictures.

  Raises:
    UserError: if a file cannot be read or the page cannot be written.
  """
  import jinja2

  loader = jinja2.FileSystemLoader(TEMPLATES)
  environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
  with report_write_errors(path):
    sources = [_data_address(picture) for picture in pictures]
    page = environment.get_template('pictures.html.jinja')
    write_text(path, page.render(title=title, description=description, sources=sources))


def _data_address(picture: Path) -> str:
  media_type = MEDIA_TYPES[choose(picture.suffix, MEDIA_TYPES, 'format of pictures')]
  return f'data:{media_type};base64,{base64.b64encode(picture.read_bytes()).decode()}'
