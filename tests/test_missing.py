"""The error for subpackages of a distribution that is not installed; test_cli.py tests it with the wheels."""

import sys

import pytest

import attention_jax as aj
from attention_jax.missing import TRAIN_MODULES, TRAIN_SUBPACKAGES, MissingTrainFinder


@pytest.mark.parametrize('name', TRAIN_SUBPACKAGES)
def test_subpackages_are_attributes_if_they_are_installed(name):
  assert getattr(aj, name) is sys.modules[f'attention_jax.{name}']


def test_only_modules_of_the_train_distribution_raise_the_error():
  for name in TRAIN_MODULES:
    with pytest.raises(ModuleNotFoundError, match=f'^{name} is not installed; run pip install '):
      MissingTrainFinder.find_spec(name)
  for name in ('attention_jax.sistems', 'attention_jax.systems.base', 'systems', 'other.systems'):
    assert MissingTrainFinder.find_spec(name) is None
