"""Paths of pictures are checked, and errors of writing name the path."""

import pytest

from attention_jax.analysis.picture_files import check_png_path, select_by_suffix
from attention_jax.errors import UserError, report_write_errors


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
