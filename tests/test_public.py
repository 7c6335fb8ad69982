"""The public names that need optional packages."""

import sys

import pytest

import attention_jax as aj


def test_a_name_that_needs_a_missing_package(monkeypatch):
  monkeypatch.delitem(sys.modules, 'attention_jax.modules.attention', raising=False)
  monkeypatch.setitem(sys.modules, 'flax', None)
  with pytest.raises(
    ImportError, match=r"attention_jax\.Attention needs the package 'flax'; pip install 'attention_jax\["
  ):
    _ = aj.Attention
