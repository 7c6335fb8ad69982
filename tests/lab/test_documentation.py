"""The generated documentation is up to date and complete; test_documents.py runs the code blocks of all documents."""

import pytest

from attention_jax.systems.presets import PRESETS
from lab import documentation

ROOT = documentation.DOCS.parent
README = (ROOT / 'README.md').read_text('utf-8')


@pytest.mark.parametrize('name', ['variants.md', 'config.md', 'analyses.md'])
def test_generated_files_are_up_to_date(name):
  text = (documentation.DOCS / name).read_text('utf-8')
  assert text == documentation.pages()[name], 'run: python -m lab.documentation'


def test_outdated_and_missing_files_are_found(tmp_path):
  assert documentation.outdated_pages(tmp_path) == [tmp_path / name for name in documentation.pages()]
  for name, text in documentation.pages().items():
    (tmp_path / name).write_text(text, 'utf-8')
  assert documentation.outdated_pages(tmp_path) == []
  (tmp_path / 'config.md').write_text('old', 'utf-8')
  assert documentation.outdated_pages(tmp_path) == [tmp_path / 'config.md']


def test_readme_links_the_generated_files():
  for name in documentation.pages():
    assert f'(docs/{name})' in README


def test_every_preset_and_config_is_named():
  documents = README + ''.join(path.read_text('utf-8') for path in documentation.DOCS.glob('*.md'))
  presets = {preset for table in PRESETS.values() for preset in table}
  configs = {path.stem for path in (ROOT / 'configs').glob('[a-z]*.py')}
  assert [name for name in sorted(presets | configs) if f'`{name}`' not in documents] == []


def test_tables_of_presets_leave_out_only_the_attention_of_models_without_attention():
  section = documentation.variants_page().partition('## Presets')[2]
  incomplete = [line.split('`')[1] for line in section.splitlines() if line.startswith('| `') and '|  |' in line]
  assert incomplete == ['sutskever2014', 'sutskever2014_mapped', 'cho2014']
