"""What the README says is so: its tables are the registries, its example prints what stands beside it."""

import contextlib
import io
import re

from attention_jax.systems.presets import PRESETS
from experiments import readme

TEXT = readme.README.read_text('utf-8')


def test_tables_are_the_registries():
  assert readme.update_tables(TEXT) == TEXT, 'run: python -m experiments.readme --write'


def test_the_example_prints_what_it_says():
  code, printed = re.search(r'```python\n(import jax\n.*?)```\n```text\n(.*?)```', TEXT, re.DOTALL).groups()
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    exec(compile(code, 'README.md', 'exec'), {})
  assert out.getvalue() == printed


def test_presets_and_configs_are_named():
  for preset in (name for presets in PRESETS.values() for name in presets):
    assert f'`{preset}`' in TEXT
  for config in (readme.README.parent / 'configs').glob('[a-z]*.py'):
    assert f'`{config.stem}`' in TEXT
