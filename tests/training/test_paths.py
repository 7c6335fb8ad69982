"""Names that can be no run folder are one-line errors."""

from pathlib import Path

import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax.errors import UserError
from attention_jax.training.paths import run_path


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('s3://a/b', "'s3://a/b': orbax does not write to S3; expected gs:// or a folder of a mounted bucket"),
    ('gs://', 'names no folder of a bucket; expected gs://BUCKET/FOLDER'),
    ('gs://bucket/', 'names no folder of a bucket'),
    ('https://a/b', "'https://a/b' is a URL"),
    ('https:/a', 'is a URL'),
    ('-', "'-' stands for no folder"),
    ('', "'' is the name of no folder; expected '.'"),
    ('a\0b', r'cannot use .a\\x00b. as a folder: .*null'),
    ('\ud800', r'cannot use .\\ud800. as a folder: '),
    ('@dates', "'@dates' names a ready-made model"),
    ('~nobody-has-this-name/x', 'cannot use .*: could not determine the home directory'),
    ('a' * 300, r'cannot use .*aaa\.\.\.aaa.* as a folder: File name too long'),
  ],
)
def test_invalid_names_are_errors(name, message):
  with pytest.raises(UserError, match=message) as error:
    run_path(name)
  assert len(str(error.value)) < 200


@pytest.mark.long
@settings(deadline=None, max_examples=30)
@given(st.text())
def test_any_text_is_a_path_or_a_user_error(name):
  try:
    assert isinstance(run_path(name), epath.Path)
  except UserError as error:
    assert len(error.lines) == 1


def test_home_is_expanded_and_a_folder_may_be_new(tmp_path, monkeypatch):
  monkeypatch.setenv('HOME', str(tmp_path))
  assert run_path('~/new') == tmp_path / 'new' and run_path(Path('new')) == Path('new')
