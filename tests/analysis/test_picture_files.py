"""Paths of pictures are checked, and errors of writing name the path."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attention_jax.analysis import heatmap
from attention_jax.analysis.picture_files import check_png_path, select_by_suffix
from attention_jax.errors import UserError, report_write_errors
from attention_jax.systems.captioning import overlays as image_overlays
from attention_jax.systems.glimpsing import paths as glimpse_paths
from attention_jax.systems.recall import tapes as memory_tapes


def test_the_suffix_selects_the_writer_in_any_case():
  assert select_by_suffix('a/b.PNG', {'.png': 1, '.html': 2}) == 1
  with pytest.raises(UserError, match=r'^a.jpg: expected a path that ends with .png or .html$'):
    select_by_suffix('a.jpg', {'.png': 1, '.html': 2})
  with pytest.raises(UserError, match=r'^a: expected a path that ends with .png$'):
    check_png_path('a')


def test_errors_of_writing_name_the_path(tmp_path):
  message = rf'^{tmp_path}: cannot be written \(Is a directory\)$'
  with pytest.raises(UserError, match=message), report_write_errors(tmp_path):
    tmp_path.open('w')


GREY = np.full((8, 8, 3), 200, np.uint8)
TAPE = memory_tapes.MemoryTape(np.eye(2), np.eye(2), np.eye(2), {'write': np.ones((4, 1, 2))}, 2)
WRITERS = {
  'heatmap': lambda path: heatmap(np.eye(2), ['a', 'b'], ['c', 'd'], path),
  'glimpses': lambda path: glimpse_paths.write([glimpse_paths.GlimpsePath(GREY, np.zeros((1, 2)))], path, 4, 1),
  'memory': lambda path: memory_tapes.write([TAPE], path),
  'captions': lambda path: image_overlays.write([image_overlays.CaptionOverlay(GREY, ['a'], np.ones((1, 2, 2)))], path),
}


@pytest.mark.long
@pytest.mark.parametrize(('name', 'suffix'), [*((name, '.png') for name in WRITERS), ('captions', '.gif')])
def test_a_picture_that_cannot_be_written_leaves_the_file_as_it_was(tmp_path, monkeypatch, name, suffix):
  save = Image.Image.save

  def write_half(image, file, format=None, **options):
    if isinstance(file, io.BytesIO) or f'.{format}'.lower() != suffix:
      return save(image, file, format, **options)
    Path(file).write_bytes(b'half')
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(Image.Image, 'save', write_half)
  path = (tmp_path / 'a.png').with_suffix(suffix)
  path.write_bytes(b'whole')
  with pytest.raises(UserError, match=r'a\.png: cannot be written \(No space left on device\)'):
    WRITERS[name](tmp_path / 'a.png')
  assert path.read_bytes() == b'whole'
  assert not [other for other in tmp_path.iterdir() if other.suffix not in ('.png', '.gif')]
