"""Stored configs of any content are completed, or reported in one line."""

import pytest
from flax.traverse_util import unflatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_jax.errors import UserError
from attention_jax.systems.config import default_run_config, flatten_config, parse_config

DEFAULT = flatten_config(default_run_config('translation'))
VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
  lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
  max_leaves=5,
)
CONFIGS = VALUES | st.dictionaries(st.sampled_from(sorted(DEFAULT)), VALUES, max_size=4).map(
  lambda changes: unflatten_dict(DEFAULT | changes, sep='.')
)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(CONFIGS)
def test_any_stored_config_is_completed_or_reported_in_one_line(config):
  try:
    assert flatten_config(parse_config(config)).keys() == DEFAULT.keys()
  except UserError as error:
    assert len(error.lines) == 1
