"""Pages of the documentation site that are not Markdown files of docs/: the hook of mkdocs.yml.

The site has the paths of the repository, so that the links of a document hold in both. Besides files of docs/, it
contains the documents of the root and of lab/, the reference of variants, config fields and analyses
(documentation.py), a page for each mechanism (mechanisms.py), the API reference, the lesson as a page, and pages that
show what ready-made models attend to. Links to files of the repository that are not in the site, such as configs,
become plain text.
"""

import base64
import functools
import importlib
import json
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import attention_jax as aj
from attention_jax.systems import runs
from attention_jax.systems.experiment import RESULTS
from attention_jax.systems.ready_made import PREFIX, READY_MADE, ready_made_folder
from lab import documentation
from lab.mechanisms import draw_picture, mechanism_page, mechanisms, overview_page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / 'docs'
COPIED_SUFFIXES = ('.md', '.png', '.sbatch')  # suffixes of the files of docs/ that the site contains
LESSON = 'docs/attention_basics.ipynb'
LESSON_PAGE = 'docs/attention_basics.md'
MODELS_PAGE = 'attention/index.md'
FRAME_STYLE = 'width: 100%; height: 44rem; border: 0'
# Run folders that are shown in place of ready-made models, if their training has finished.
TRAINED_BY_MAKE = {'dates': ROOT / 'runs' / 'dates'}  # `make train`
MODEL_ROWS = [str(row) for row in range(8)]  # of the test split, on the page of a ready-made model
# Modules of the API reference: page -> module, and the names that it documents; None for all public ones.
API_MODULES = {
  'attention_jax': ('attention_jax', aj.__all__),
  'scores': ('attention_jax.scores', aj.SCORES),
  'alignments': ('attention_jax.alignments', aj.ALIGNMENTS),
  'analysis': ('attention_jax.analysis', None),
}
# Content of a file of the site: a file to copy, or a function that makes it.
Source = Path | Callable[[], str | bytes]
LINK = re.compile(r'(?<!\!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
  """Adds mechanisms, the API reference, the claims and the unlisted documents to the navigation."""
  config.nav = navigation(config.nav)
  return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Moves files of docs/ to the paths that they have in the repository, and adds the other pages."""
  theme_files = [file for file in files if DOCS not in Path(file.abs_src_path or '').parents]
  pages = [_make_file(config, path, source) for path, source in site_files().items()]
  return Files([*theme_files, *pages])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Replaces links to files of the repository that are not in the site, as a hook of mkdocs; see `resolve_links`.

  Args:
    markdown: text of the page.
    page: the page.
    config: the config of mkdocs, which is not read.
    files: all files of the site.

  Returns:
    The text of the page with resolved links.
  """
  paths = {file.src_uri for file in files}
  return resolve_links(markdown, page.file.src_uri, paths)


def navigation(nav: list[Any]) -> list[Any]:
  """Returns the navigation of mkdocs.yml with the generated pages, the claims, and the unlisted files docs/*.md."""
  by_kind: dict[str, list[Any]] = {}
  for mechanism in mechanisms():
    by_kind.setdefault(f'{mechanism.kind.capitalize()}s', []).append({mechanism.name: mechanism.path})
  generated = [
    {'Mechanisms': ['mechanisms/index.md', *({title: pages} for title, pages in by_kind.items())]},
    {'API reference': [{module: f'api/{name}.md'} for name, (module, _) in API_MODULES.items()]},
  ]
  claims = sorted(f'docs/claims/{path.name}' for path in (DOCS / 'claims').glob('[a-z]*.md'))
  unlisted = sorted({f'docs/{path.name}' for path in DOCS.glob('*.md')} - set(nav_pages(nav)))
  nav = [*nav, {'Claims': ['docs/claims/README.md', *claims]}]
  if unlisted:
    nav.append({'Further documents': unlisted})
  results_index = next(i for i, entry in enumerate(nav) if 'Results' in entry)
  return [*nav[:results_index], *generated, *nav[results_index:]]


def nav_pages(nav: list[Any]) -> Iterator[str]:
  """Yields the path of every page of a navigation."""
  for entry in nav:
    if isinstance(entry, str):
      yield entry
    else:
      for value in entry.values():
        yield from [value] if isinstance(value, str) else nav_pages(value)


def site_files() -> dict[str, Source]:
  """Returns the source of each file of the site by its path. No function is called yet."""
  documents = [*ROOT.glob('*.md'), *(ROOT / 'lab').glob('*.md')]
  documents += [path for path in DOCS.rglob('*') if path.suffix in COPIED_SUFFIXES]
  files: dict[str, Source] = {str(path.relative_to(ROOT)): path for path in sorted(documents)}
  files |= documentation.PAGES
  for mechanism in mechanisms():
    files[mechanism.path] = functools.partial(mechanism_page, mechanism)
    files[mechanism.picture] = functools.partial(draw_picture, mechanism)
  files['mechanisms/index.md'] = overview_page
  files |= {f'api/{name}.md': functools.partial(api_page, name) for name in API_MODULES}
  files |= model_files()
  return files | lesson_files(json.loads((ROOT / LESSON).read_text('utf-8')))


def api_page(name: str) -> str:
  """Returns the page of API_MODULES with this name.

  It has an entry of mkdocstrings for each public name, or a link if the name has a page of its own.
  """
  module, _ = API_MODULES[name]
  parts = [f'# {module}']
  for public_name, path in api_entries(name).items():
    parts.append(f'::: {path}' if path else f'## {public_name}\n\n[`{module}.{public_name}`]({public_name}.md)')
  return '\n\n'.join(parts) + '\n'


def api_entries(name: str) -> dict[str, str | None]:
  """Returns the path by which mkdocstrings finds each public name of a module; None for a module with its own page."""
  path, names = API_MODULES[name]
  module = importlib.import_module(path) if path in ('attention_jax', 'attention_jax.analysis') else getattr(aj, name)
  entries: dict[str, str | None] = {}
  for public_name in names or module.__all__:
    value = names[public_name].fn if isinstance(names, dict) else getattr(module, public_name)
    if public_name in API_MODULES:
      entries[public_name] = None
    else:
      entries[public_name] = _definition(value) or f'{path}.{public_name}'
  return entries


def model_files() -> dict[str, Source]:
  """Returns a page about the ready-made models, and a page for each that has been made, with what it attends to.

  Omits models whose data the user must provide: the data of NETtalk may not be distributed.
  """
  names = [name for name, model in READY_MADE.items() if not model.data]
  made = [name for name in names if model_folder(name).exists()]
  files: dict[str, Source] = {f'attention/{name}.html': functools.partial(attention_page, name) for name in made}
  return files | {MODELS_PAGE: functools.partial(models_page, made, [name for name in names if name not in made])}


def model_folder(name: str) -> Path:
  """Returns the run folder that the page of a ready-made model shows; the folder need not exist."""
  trained = TRAINED_BY_MAKE.get(name)
  return trained if trained and (trained / RESULTS).exists() else ready_made_folder(name)


def models_page(made: Sequence[str], missing: Sequence[str]) -> str:
  """Returns Markdown that shows the pages of ready-made models, and names those that have not been made."""
  parts = [
    '# Attention of ready-made models',
    'What trained models attend to in the first rows of their test splits. Choose an example, and move the slider over '
    'its steps. Each page is a file of its own; this command writes it for any trained run:\n\n'
    '```sh\npython -m experiments.inspect_attention --workdir=@dates --rows=0,1,2 --output=page.html\n```',
  ]
  for name in made:
    frame = f'<iframe src="{name}.html" title="attention of {PREFIX}{name}" style="{FRAME_STYLE}"></iframe>'
    parts.append(f'## {PREFIX}{name}\n\n`{READY_MADE[name].config}`. [The page alone]({name}.html).\n\n{frame}')
  if missing:
    commands = '\n'.join(f'python -m experiments.models --names={name}' for name in missing)
    intro = 'These models had not been trained when this site was built. Run the commands and build it again:'
    parts.append(f'{intro}\n\n```sh\n{commands}\n```')
  return '\n\n'.join(parts) + '\n'


def attention_page(name: str) -> str:
  """Returns the HTML page of a ready-made model."""
  run = runs.open_run(model_folder(name))
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / 'page.html'
    run.system.plot(run.params, path, split='test', rows=MODEL_ROWS, inputs=())
    return path.read_text('utf-8')


def lesson_files(notebook: dict[str, Any]) -> dict[str, Source]:
  """Returns the page of the lesson and its pictures, from the cells and the stored outputs of a notebook."""
  parts = []
  files: dict[str, Source] = {}
  for cell in notebook['cells']:
    source = ''.join(cell['source'])
    if cell['cell_type'] == 'markdown':
      parts.append(source)
      continue
    parts.append(f'```python\n{source}\n```')
    for output in cell['outputs']:
      data = output.get('data', {})
      if 'image/png' in data:
        name = f'attention_basics_{len(files)}.png'
        files[f'docs/{name}'] = functools.partial(base64.b64decode, data['image/png'])
        parts.append(f'![Plot of the code above]({name})')
      elif text := ''.join(output.get('text', data.get('text/plain', ''))):
        parts.append(f'```text\n{text.rstrip()}\n```')
  return files | {LESSON_PAGE: lambda: '\n\n'.join(parts) + '\n'}


def resolve_links(markdown: str, page: str, paths: set[str]) -> str:
  """Returns the Markdown with plain text for links to files of the repository that are not in the site.

  Links to the notebook of the lesson become links to its page.

  Args:
    markdown: text of the page.
    page: path of the page.
    paths: paths of the files of the site.
  """

  def resolve(match: re.Match) -> str:
    text, target, anchor = match.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if path == LESSON:
      return f'[{text}]({target.removesuffix(".ipynb")}.md{anchor or ""})'
    if path not in paths and (ROOT / path).exists():
      return text
    return match.group()

  return LINK.sub(resolve, markdown)


def _make_file(config: MkDocsConfig, path: str, source: Source) -> File:
  if isinstance(source, Path):
    return File.generated(config, path, abs_src_path=str(source))
  return File.generated(config, path, content=source())


def _definition(value: Any) -> str | None:
  """Path of the definition of a function or a class; None for other values."""
  return f'{value.__module__}.{value.__qualname__}' if isinstance(value, Callable | type) else None
