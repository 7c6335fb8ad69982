"""The generated reference is complete; test_documents.py runs the code blocks of all documents."""

import pytest

from attention_jax.systems.presets import PRESETS
from experiments.config_files import PROJECT
from lab import documentation


@pytest.mark.parametrize('path', documentation.PAGES)
def test_pages_have_a_title_and_tables_without_empty_names(path):
  text = documentation.PAGES[path]()
  assert text.startswith('# ') and '| --- |' in text and '| `` |' not in text


def test_every_preset_and_config_is_named():
  documents = documentation.variants_page() + (PROJECT / 'README.md').read_text('utf-8')
  documents += ''.join(path.read_text('utf-8') for path in (PROJECT / 'docs').glob('*.md'))
  presets = {preset for table in PRESETS.values() for preset in table}
  configs = {path.stem for path in (PROJECT / 'configs').glob('[a-z]*.py')}
  assert [name for name in sorted(presets | configs) if f'`{name}`' not in documents] == []


def test_tables_of_presets_leave_out_only_the_attention_of_models_without_attention():
  section = documentation.variants_page().partition('## Presets')[2]
  incomplete = [line.split('`')[1] for line in section.splitlines() if line.startswith('| `') and '|  |' in line]
  assert incomplete == ['sutskever2014', 'sutskever2014_mapped', 'cho2014']
