"""The tables of variants in README.md, from the registries.

python -m experiments.readme           # prints them
python -m experiments.readme --write   # puts them into README.md
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from absl import flags

from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES
from attention_jax.functional.table import Row, option_schema, parameter_names
from attention_jax.kernels import pallas_additive
from attention_jax.kernels.api import IMPLEMENTATIONS
from attention_jax.losses import auxiliary
from attention_jax.losses.auxiliary import AuxiliaryLoss
from attention_jax.losses.objectives import OBJECTIVES
from attention_jax.models.classifiers import CLASSIFIERS
from attention_jax.models.decoders import DECODERS
from attention_jax.models.encoders import ENCODERS
from attention_jax.models.image_encoders import IMAGE_ENCODERS
from attention_jax.models.turing import RECALL_CELLS
from attention_jax.modules.outputs import OUTPUTS
from attention_jax.modules.pooling import POOLINGS
from attention_jax.modules.positions import POSITIONS, SET_BY_ATTENTION, Positions
from attention_jax.modules.transformer import ACTIVATIONS, NORMS
from attention_jax.systems import classification
from attention_jax.systems.presets import PRESETS
from experiments.launch import FLAGS, launch

README = Path(__file__).parent.parent / 'README.md'
HEAD = ('equation and source', 'learned', 'options', 'queries')
# What the tables of presets show of each: column -> field of config.model.
PAIRS = {
  'encoder': 'encoder',
  'decoder': 'decoder',
  'score': 'attention.score',
  'alignment': 'attention.alignment',
}
DOCUMENTS = {name: name for name in ('classifier', 'encoder', 'pooling')} | {'score': 'attention.score'}
GIVEN = ('parent', 'name', 'dtype', 'embedding', 'attention', 'size')
BEGIN, END = '<!-- tables:', '<!-- /tables -->'

flags.DEFINE_bool('write', False, 'put the tables into README.md')


def tables() -> str:
  """Markdown: every table that a config can name a row of; what each row says of itself."""
  parts = [
    _table(['score', *HEAD], _rows(SCORES)),
    _table(['alignment', *HEAD], _rows(ALIGNMENTS)),
    _table(['objective', *HEAD[:1], 'options'], _objectives()),
    _table(['auxiliary loss', *HEAD[:1], 'options'], _losses(auxiliary.LOSSES)),
    _table(['implementation', '', 'refuses'], _implementations()),
    _modules('encoder', ENCODERS),
    _modules('decoder', DECODERS),
    _modules('output', OUTPUTS),
    _modules('position of a Transformer', POSITIONS),
    _table(['norm of a Transformer', ''], ((name, row.description) for name, row in NORMS.items())),
    _table(['activation of a Transformer', ''], ((name, row.description) for name, row in ACTIVATIONS.items())),
    _presets('translation', PAIRS),
    _modules('classifier of documents', CLASSIFIERS),
    _modules('pooling', POOLINGS),
    _table(['auxiliary loss of classifiers', *HEAD[:1], 'options'], _losses(classification.CLASSIFIER_LOSSES)),
    _presets('classification', DOCUMENTS),
    _modules('encoder of pictures', IMAGE_ENCODERS),
    _presets('captioning', PAIRS),
    _presets('glimpsing', {}),
    _modules('cell of a network that remembers', RECALL_CELLS),
    _presets('recall', {'cell': 'cell'}),
  ]
  return '\n\n'.join(parts)


def update_tables(readme: str) -> str:
  """`readme` with the tables of now."""
  head, rest = readme.split(BEGIN, 1)
  marker, rest = rest.split('\n', 1)
  _, tail = rest.split(END, 1)
  return f'{head}{BEGIN}{marker}\n{tables()}\n{END}{tail}'


def _rows(table: Mapping[str, Row]) -> Iterable[tuple[str, ...]]:
  for name, row in table.items():
    mine = {k: v for k, v in ((n, o.default) for n, o in option_schema(row).items()) if k not in row.params}
    recurrent = 'in order' if row.is_recurrent else 'all at once'
    yield name, _first(row.fn), _listed(parameter_names(row)), _listed(f'{k}={v}' for k, v in mine.items()), recurrent


def _implementations() -> Iterable[tuple[str, ...]]:
  pairs = list(itertools.product(SCORES.values(), ALIGNMENTS.values()))
  for name, implementation in IMPLEMENTATIONS.items():
    with pallas_additive.compile_for('gpu'):  # whatever this machine has
      reasons = dict.fromkeys(filter(None, (implementation.unsupported_reason(*pair) for pair in pairs)))
    yield name, implementation.description, 'pairs where ' + ', or '.join(reasons) if reasons else 'nothing'


def _losses(table: Mapping[str, AuxiliaryLoss]) -> Iterable[tuple[str, ...]]:
  for name, row in table.items():
    yield name, _first(row.fn), _listed(f'{k}={v}' for k, v in auxiliary.options(row).items())


def _objectives() -> Iterable[tuple[str, ...]]:
  for name, row in OBJECTIVES.items():
    given = inspect.signature(row.build).parameters.values()
    yield name, _first(row.build), _listed(f'{p.name}={p.default}' for p in given)


def _table(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
  lines = ['| ' + ' | '.join(head) + ' |', '|' + ' --- |' * len(head)]
  return '\n'.join(lines + [f'| `{name}` | ' + ' | '.join(cells) + ' |' for name, *cells in rows])


def _modules(what: str, table: Mapping[str, type]) -> str:
  return _table([what, '', 'options'], ((name, _first(cls), _listed(_fields(cls))) for name, cls in table.items()))


def _fields(cls: type) -> Iterable[str]:
  """The options of a spec and their defaults: fields that nobody else says."""
  given = {*GIVEN, *(SET_BY_ATTENTION if issubclass(cls, Positions) else ())}
  for field in dataclasses.fields(cls):
    if field.name not in given and field.default is not dataclasses.MISSING:
      yield f'{field.name}={field.default!r}'


def _presets(system: str, fields: Mapping[str, str]) -> str:
  lines = ['| ' + ' | '.join(('preset', 'paper', *fields)) + ' |', '|' + ' --- |' * (2 + len(fields))]
  for name, (paper, settings) in PRESETS[system].items():
    values = (settings.get(f'model.{field}', '').partition('(')[0] for field in fields.values())
    lines.append('| ' + ' | '.join((f'`{name}`', paper, *(f'`{v}`' if v else '' for v in values))) + ' |')
  return '\n'.join(lines)


def _first(thing: Callable) -> str:
  return inspect.getdoc(thing).split('\n\n')[0].replace('\n', ' ').replace('|', '\\|')


def _listed(names: Iterable[str]) -> str:
  return ', '.join(f'`{name}`' for name in names)


def main() -> None:
  if FLAGS.write:
    README.write_text(update_tables(README.read_text('utf-8')), 'utf-8')
  else:
    print(tables())


if __name__ == '__main__':
  launch(main)
