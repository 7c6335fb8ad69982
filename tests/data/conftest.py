"""Fixtures of this folder."""

import pytest


@pytest.fixture
def write(tmp_path, monkeypatch):
  """A function that writes a file into the working directory, an empty folder, and returns its name."""
  monkeypatch.chdir(tmp_path)

  def write_file(name, content):
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    return name

  return write_file
