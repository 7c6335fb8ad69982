"""Documents: Python blocks run, shell blocks name existing programs, flags, configs and fields; links lead to files."""

import contextlib
import functools
import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import attention_jax as aj
from attention_jax.data.builders import dates
from attention_jax.systems.config import default_config
from experiments.config_files import load_config
from lab.documentation import ANALYSES_INTRODUCTION
from tests.systems.helpers import two_devices

ROOT = Path(aj.__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob('*.md'), *(ROOT / 'docs').rglob('*.md'), *(ROOT / 'lab').glob('*.md')])
BLOCK = re.compile(r'^```(\w+)\n(.*?)^```\n(?:```text\n(.*?)^```\n)?', re.DOTALL | re.MULTILINE)


def blocks(language):
  """Returns (document, code, expected output or '') of every block in this language, in files or on generated pages."""
  texts = [*((path.name, path.read_text('utf-8')) for path in DOCUMENTS), ('analyses.md', ANALYSES_INTRODUCTION)]
  params = []
  for document, text in texts:
    for name, code, output in BLOCK.findall(text):
      if name == language:
        params.append(pytest.param(document, code, output, id=f'{document.removesuffix(".md")}-{len(params)}'))
  return params


SHARED = ('experiments/launch', 'experiments/distributed', 'lab/topologies')  # define flags of several programs


@functools.cache
def program_flags(program):
  """The flags that a program such as 'experiments.train' defines, read from its source and from those of SHARED."""
  text = ''.join((ROOT / f'{path}.py').read_text('utf-8') for path in (program.replace('.', '/'), *SHARED))
  return set(re.findall(r"DEFINE_\w+\(\s*'(\w+)'", text)) | {'help'}


@functools.cache
def config_of(path):
  # The preset of from_run is a run, which a document only names.
  return default_config() if path.startswith('configs/from_run.py') else load_config(str(ROOT / path))


def documents_with_python():
  """Returns (document, its Python blocks with their outputs) of every document that has any."""
  groups = itertools.groupby((param.values for param in blocks('python')), key=lambda values: values[0])
  documents = {document: list(group) for document, group in groups}
  return [
    pytest.param(document, group, id=document, marks=pytest.mark.long if 'aj.train(' in str(group) else ())
    for document, group in documents.items()
  ]


@pytest.mark.parametrize(('document', 'document_blocks'), documents_with_python())
def test_python_blocks_of_a_document_run_in_order(document, document_blocks, tmp_path, monkeypatch, restored_tables):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(dates, 'SIZES', dict.fromkeys(dates.SIZES, 64))  # those of the data set take long to generate
  names = {'__name__': '__main__'}
  for _, code, output in document_blocks:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), two_devices():
      exec(compile(code, document, 'exec'), names)
    if output:
      assert printed.getvalue() == output


@pytest.mark.long
def test_the_evening_can_be_followed_in_one_shell(tmp_path):
  text = (ROOT / 'docs' / 'tutorials' / 'evening.md').read_text('utf-8')
  script = ''
  for language, code, _ in BLOCK.findall(text):
    if language == 'python':
      script += f"python - <<'END'\n{code}END\n"
    elif language == 'sh':
      script += code.replace('steps=200', 'steps=4').replace('every=100', 'every=2')
  path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
  environment = {'PATH': path, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''}
  subprocess.run(['bash', '-ec', script], cwd=tmp_path, env=os.environ | environment, check=True)
  assert (tmp_path / 'head.html').exists()
  assert {'report.html', 'paper.tex', 'paper.md', 'paper.bib', 'figure.pdf'} <= {
    path.name for path in (tmp_path / 'runs' / 'scores').iterdir()
  }


@pytest.mark.long
@pytest.mark.parametrize(('document', 'code', 'output'), blocks('sh'))
def test_shell_blocks_parse_and_name_programs_flags_and_fields_that_exist(document, code, output):
  subprocess.run(['bash', '-n'], input=code, text=True, check=True)
  for line in code.replace('\\\n', ' ').splitlines():
    words = shlex.split(line, comments=True)
    if '-m' not in words or not words[words.index('-m') + 1].startswith(('experiments.', 'lab.')):
      continue
    known_flags = program_flags(words[words.index('-m') + 1])
    config = None
    for word in words[words.index('-m') + 2 :]:
      if not word.startswith('--'):
        continue
      name = word.lstrip('-').partition('=')[0]
      if name.startswith('config.'):
        functools.reduce(lambda fields, part: fields[part], name.split('.')[1:], config)
      else:
        assert name in known_flags, f'{document}: {line}'
      if name == 'config':
        config = config_of(word.partition('=')[2])


@pytest.mark.parametrize('document', DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document):
  for target in re.findall(r'\]\(([^)#:]+)(?:#[^)]*)?\)', document.read_text('utf-8')):
    assert (document.parent / target).exists(), f'{document.name} links to {target}'


def test_the_architecture_names_files_that_exist():
  names = re.findall(r'`([\w/]+(?:\.py|/))`', (ROOT / 'ARCHITECTURE.md').read_text('utf-8'))
  package = Path(aj.__file__).parent
  assert [name for name in names if not (package / name).exists() and not (ROOT / name).exists()] == []
