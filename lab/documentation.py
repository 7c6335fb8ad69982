"""Pages of the documentation site about variants, config fields and analyses, from the tables and the configs."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from attention_jax.analysis.analyses import ANALYSES
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.edits import EDITS
from attention_jax.functional.scores import SCORES
from attention_jax.functional.spatial import TRANSFORMS
from attention_jax.functional.table import Row, option_schema, parameter_names
from attention_jax.kernels.api import IMPLEMENTATIONS
from attention_jax.kernels.target import compile_for
from attention_jax.losses import auxiliary
from attention_jax.losses.auxiliary import AuxiliaryLoss
from attention_jax.losses.objectives import OBJECTIVES
from attention_jax.models.decoders import DECODERS
from attention_jax.models.encoders import ENCODERS
from attention_jax.modules.outputs import OUTPUTS
from attention_jax.modules.pooling import POOLINGS
from attention_jax.modules.positions import POSITIONS, SET_BY_ATTENTION, Positions
from attention_jax.modules.transformer import ACTIVATIONS, NORMS
from attention_jax.specs import REQUIRED, Option, schema_of
from attention_jax.systems.captioning.model import IMAGE_ENCODERS
from attention_jax.systems.classification.model import CLASSIFIERS
from attention_jax.systems.config import FieldDescription, describe_config
from attention_jax.systems.glimpsing.glimpses import GlimpseConfig
from attention_jax.systems.glimpsing.model import NETWORKS
from attention_jax.systems.presets import PRESETS
from attention_jax.systems.recall.model import RECALL_CELLS
from attention_jax.systems.registry import SYSTEMS

VARIANTS_INTRODUCTION = (
  "Options are set in the name, `'softmax(temperature=0.5)'`; *learned* lists the parameters of a variant. Queries are "
  'computed in parallel, or in order if a variant depends on the number of the query or on previous queries. '
  "`attention_jax.testing` checks that scores and alignments of one's own obey the contract of masks; see "
  '[the tutorial](tutorials/variant.md).'
)
IMPLEMENTATIONS_INTRODUCTION = (
  'All compute one function, up to rounding. `xla` also has second derivatives and forward mode (`jax.hessian`, '
  '`jax.jvp`, `jax.jacfwd`, `jax.linearize`). `auto`, `factored`, `flash`, `cudnn` and `pallas_additive` have first '
  'derivatives in reverse mode alone (`jax.grad`, `jax.vjp`, `jax.jacrev`), at every size. They raise a `UserError` '
  'for others: an eager call at once, a function under `jax.jit` when it is compiled.'
)
CONFIG_INTRODUCTION = (
  'A flag sets a field: `--config.training.steps=5000`. Defaults are those of the system; presets and config files '
  'change them, and `python -m experiments.train --config=FILE:PRESET --help_config` prints the values of one config.'
)

ANALYSES_INTRODUCTION = """`inspect_attention --analyses=NAME`, which may be repeated, computes analyses of a trained
run of translation. A picture (`.png`, the default) has heatmaps of the weights and of values for pairs of tokens, but
no lists such as those of `kendall`. An `--output` with the suffix `.html` is a page for a browser, which needs no
network: tokens joined by lines, heatmaps, lists, sliders over steps, layers, heads and hypotheses, and several runs
side by side (`--compare`). One with the suffix `.json` has all numbers.
`--words` merges the weights of subwords or characters to those of words. In a notebook,
`aj.analysis.show(run, 'a sentence', analyses=['entropy'])` shows the page; `run` is
`aj.open_run('runs/dates')`.

```sh
python -m experiments.inspect_attention --workdir=runs/dates --rows=0 --analyses=integrated_gradients
python -m experiments.inspect_attention --workdir=runs/dates --rows=0 --analyses=kendall --output=kendall.html
python -m experiments.inspect_attention --workdir=runs/dates --text='5. März 1999' --output=what_if.json \\
  --analyses='what_if(edit="fixed(at=8, position=3)")'
python -m experiments.inspect_attention --workdir=runs/transformer --rows=0 --layers --output=edited.html \\
  --edit='fixed(at=8, position=3, layer=2, head=0)'
```

- Attributions, `leave_one_out` and `what_if` are of the log-probability of each target token by teacher forcing. Where
  the probability is nearly 1, its gradient is nearly 0, and so is `gradient_times_input`.
- Whether attention weights explain an output depends on the model and on what explaining means (Jain & Wallace 2019;
  Wiegreffe & Pinter 2019). `kendall` compares weights with another measure; `permutation` and `adversarial` change the
  weights of one step and compare its output. With several layers or heads, the compared outputs are those of the same
  weights in all of them: the weights that the page shows (of one layer, averaged over heads), and the changed ones.
- `--edit` shows the run with edited weights beside the run itself; for `--text`, each has its own translation. The
  page of `--serve` has a field for an edit.
- An edit changes the weights of every layer and head of a decoder over the source, or of those that `layer` and `head`
  name, counted from 0. `aj.with_edit(alignment, edit)` adds an edit to an alignment that is not latent, for
  `aj.attend` and for modules. An edit is the name of a row below, or a function of weights [S] and mask [S].
- The functions themselves are in `aj.analysis`, on arrays and on functions of arrays. Some of them need scipy or optax,
  which are in the extra `train`."""

# Columns of the tables of presets: column -> field of config.model.
TRANSLATION_COLUMNS = {
  'encoder': 'encoder',
  'decoder': 'decoder',
  'score': 'attention.score',
  'alignment': 'attention.alignment',
}
CLASSIFICATION_COLUMNS = {
  'classifier': 'classifier',
  'encoder': 'encoder',
  'pooling': 'pooling',
  'score': 'attention.score',
}
GLIMPSE_FIELDS = [field.name for field in dataclasses.fields(GlimpseConfig)]  # set in config.model
# Fields of modules that a spec string cannot set.
SET_BY_MODEL = ('parent', 'name', 'dtype', 'embedding', 'attention', 'layer_attentions', 'size')


def variants_page() -> str:
  """Returns Markdown with the variants of attention, losses and modules that a config can name, and the presets."""
  attention = {
    'Scores': _variant_table('score', SCORES),
    'Alignments': _variant_table('alignment', ALIGNMENTS),
    'Implementations': f'{IMPLEMENTATIONS_INTRODUCTION}\n\n'
    + _table(('implementation', 'method', 'unsupported pairs'), _implementation_rows()),
  }
  losses = {
    'Objectives': _table(('objective', 'equation and source', 'options'), _objective_rows()),
    'Auxiliary losses': _loss_table('auxiliary loss', auxiliary.LOSSES),
    'Auxiliary losses of classifiers': _loss_table('auxiliary loss', auxiliary.CLASSIFIER_LOSSES),
  }
  modules = {
    'Encoders': _module_table('encoder', ENCODERS),
    'Decoders': _module_table('decoder', DECODERS),
    'Outputs': _module_table('output', OUTPUTS),
    'Positions of a Transformer': _module_table('position', POSITIONS),
    'Norms of a Transformer': _table(('norm', 'equation and source'), _description_rows(NORMS)),
    'Activations of a Transformer': _table(('activation', 'equation and source'), _description_rows(ACTIVATIONS)),
    'Classifiers of documents': _module_table('classifier', CLASSIFIERS),
    'Poolings': _module_table('pooling', POOLINGS),
    'Encoders of pictures': _module_table('encoder', IMAGE_ENCODERS),
    'Networks of glimpsing': _module_table('network', NETWORKS, GLIMPSE_FIELDS),
    'Transforms of a spatial transformer': _table(('transform', 'equation and source'), _description_rows(TRANSFORMS)),
    'Cells of recall': _module_table('cell', RECALL_CELLS),
  }
  presets = {
    'Presets of translation': _preset_table('translation', TRANSLATION_COLUMNS),
    'Presets of classification': _preset_table('classification', CLASSIFICATION_COLUMNS),
    'Presets of captioning': _preset_table('captioning', TRANSLATION_COLUMNS),
    'Presets of glimpsing': _preset_table('glimpsing', {'network': 'network'}),
    'Presets of recall': _preset_table('recall', {'cell': 'cell'}),
  }
  return _page('Variants', VARIANTS_INTRODUCTION, attention | losses | modules | presets)


def config_page() -> str:
  """Returns Markdown with every field of the config of every system."""
  sections = {}
  for system in SYSTEMS:
    for group, fields in describe_config(system).items():
      scope = 'Every system' if group in ('', 'training', 'mesh') else f'System {system}'
      title = f'{scope}: config.{group}' if group else f'{scope}: config'
      sections[title] = _table(('field', 'type', 'default', 'range', 'meaning'), _field_rows(fields))
  return _page('Config fields', CONFIG_INTRODUCTION, sections)


def analyses_page() -> str:
  """Returns Markdown with every analysis of a trained run, and every edit of weights."""
  analyses = ((name, row.description, _option_list(schema_of(row.fn))) for name, row in ANALYSES.items())
  edits = ((name, _summary(row.fn), _option_list(option_schema(row))) for name, row in EDITS.items())
  sections = {
    'Analyses': _table(('analysis', 'result', 'options'), analyses),
    'Edits of weights': _table(('edit', 'equation and source', 'options'), edits),
  }
  return _page('Analyses', ANALYSES_INTRODUCTION, sections)


def _page(title: str, introduction: str, sections: Mapping[str, str]) -> str:
  parts = [f'# {title}', introduction]
  for heading, table in sections.items():
    parts += [f'## {heading}', table]
  return '\n\n'.join(parts) + '\n'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table whose first column is code."""
  lines = ['| ' + ' | '.join(columns) + ' |', '|' + ' --- |' * len(columns)]
  for name, *cells in rows:
    escaped = [cell.replace('|', '\\|') for cell in cells]
    lines.append('| ' + ' | '.join([f'`{name}`', *escaped]) + ' |')
  return '\n'.join(lines)


def _variant_table(kind: str, table: Mapping[str, Row]) -> str:
  return _table((kind, 'equation and source', 'learned', 'options', 'queries'), _variant_rows(table))


def _variant_rows(table: Mapping[str, Row]) -> Iterable[tuple[str, ...]]:
  for name, row in table.items():
    options = {option: value for option, value in option_schema(row).items() if option not in row.params}
    queries = 'in order' if row.is_recurrent else 'in parallel'
    yield name, _summary(row.fn), _code_list(parameter_names(row)), _option_list(options), queries


def _implementation_rows() -> Iterable[tuple[str, ...]]:
  pairs = list(itertools.product(SCORES.values(), ALIGNMENTS.values()))
  for name, implementation in IMPLEMENTATIONS.items():
    with compile_for('gpu'):  # independent of the devices of this machine
      reasons = [implementation.unsupported_reason(score, alignment) for score, alignment in pairs]
    distinct = [reason for reason in dict.fromkeys(reasons) if reason]
    unsupported = f'pairs where {", or ".join(distinct)}' if distinct else 'none'
    yield name, implementation.description, unsupported


def _loss_table(kind: str, table: Mapping[str, AuxiliaryLoss]) -> str:
  rows = ((name, _summary(row.fn), _option_list(auxiliary.option_schema(row))) for name, row in table.items())
  return _table((kind, 'equation and source', 'options'), rows)


def _objective_rows() -> Iterable[tuple[str, ...]]:
  for name, row in OBJECTIVES.items():
    yield name, _summary(row.build), _option_list(schema_of(row.build))


def _description_rows(table: Mapping[str, object]) -> Iterable[tuple[str, ...]]:
  return ((name, row.description) for name, row in table.items())


def _module_table(kind: str, table: Mapping[str, type], set_by_config: Collection[str] = ()) -> str:
  rows = ((name, _summary(cls), _code_list(_module_options(cls, set_by_config))) for name, cls in table.items())
  return _table((kind, 'equation and source', 'options'), rows)


def _module_options(cls: type, set_by_config: Collection[str]) -> Iterable[str]:
  """The options of a spec with their defaults: the fields of a module that neither its parent nor the config sets."""
  excluded = {*SET_BY_MODEL, *set_by_config, *(SET_BY_ATTENTION if issubclass(cls, Positions) else ())}
  for field in dataclasses.fields(cls):
    if field.name not in excluded and field.default is not dataclasses.MISSING:
      yield f'{field.name}={field.default!r}'


def _preset_table(system: str, columns: Mapping[str, str]) -> str:
  rows = []
  for name, (paper, settings) in PRESETS[system].items():
    variants = [settings.get(f'model.{field}', '').partition('(')[0] for field in columns.values()]
    rows.append((name, paper, *(f'`{variant}`' if variant else '' for variant in variants)))
  return _table(('preset', 'paper', *columns), rows)


def _field_rows(fields: Mapping[str, FieldDescription]) -> Iterable[tuple[str, ...]]:
  for name, field in fields.items():
    default = '' if field.default is REQUIRED else f'`{field.default!r}`'
    yield name, f'`{field.type}`', default, str(field.range or ''), field.meaning


def _summary(documented: Callable) -> str:
  """Returns the first paragraph of a docstring as one line."""
  return inspect.getdoc(documented).split('\n\n')[0].replace('\n', ' ')


def _option_list(options: Mapping[str, Option]) -> str:
  return _code_list(f'{name}={option.default}' for name, option in options.items())


def _code_list(items: Iterable[str]) -> str:
  return ', '.join(f'`{item}`' for item in items)


# Path in the site -> the function that makes the page.
PAGES = {'docs/variants.md': variants_page, 'docs/config.md': config_page, 'docs/analyses.md': analyses_page}
