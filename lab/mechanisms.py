"""Pages of the documentation site about one score or one alignment each, made from the tables of variants.

A page has the equation and the paper, the signature, a picture of weights on an example that all pages share, the cost
of one query, and when to use the variant.
"""

import functools
import inspect
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import attention_jax as aj
from attention_jax.functional.alignments import ALIGNMENTS
from attention_jax.functional.scores import SCORES, scaled_dot
from attention_jax.functional.table import Row, option_schema
from attention_jax.kernels.api import supported_implementations
from attention_jax.kernels.target import compile_for
from attention_jax.systems.costs import count_matmuls, matmul_flop
from attention_jax.training.state import count_parameters
from lab.mechanism_advice import ADVICE

KINDS = {'score': SCORES, 'alignment': ALIGNMENTS}
# A sentence pair of Bahdanau, Cho & Bengio 2015, figure 3 (a), with links (source, target) by hand.
SENTENCE = 'the agreement on the European Economic Area was signed in August 1992 .'
TRANSLATION = "l' accord sur la zone économique européenne a été signé en août 1992 ."
SOURCE = SENTENCE.split()
TARGET = TRANSLATION.split()
LINKS = [(0, 0), (1, 1), (2, 2), (3, 3), (6, 4), (5, 5), (4, 6), (7, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 12)]
LINKS += [(12, 13)]
FEATURES = 16  # of queries and keys of the example
UPDATES = 40  # of the fit to its links
COST_SIZE = 256  # positions of the memory and all widths, in the section on cost


class Mechanism(NamedTuple):
  """A row of SCORES or ALIGNMENTS.

  Attributes:
    kind: 'score' or 'alignment'.
    name: its name in the table.
    row: the row.
  """

  kind: str
  name: str
  row: Row

  @property
  def path(self) -> str:
    """Path of its page in the site."""
    return f'mechanisms/{self.kind}_{self.name}.md'

  @property
  def picture(self) -> str:
    """Path of its picture in the site."""
    return f'mechanisms/{self.kind}_{self.name}.png'


class PictureExample(NamedTuple):
  """The example of all pictures.

  Attributes:
    query: [T, D], one for each target word.
    key: [S, D], one for each source word.
    links: [T, S], 1 for linked words.
  """

  query: jax.Array
  key: jax.Array
  links: jax.Array


def mechanisms() -> Iterator[Mechanism]:
  """Yields every score and every alignment, in the order of the tables."""
  for kind, table in KINDS.items():
    for name, row in table.items():
      yield Mechanism(kind, name, row)


def overview_page() -> str:
  """Returns Markdown with a link to the page of every mechanism."""
  parts = ['# Mechanisms', _OVERVIEW]
  for kind in KINDS:
    parts.append(f'## {kind.capitalize()}s')
    lines = [
      f'| [`{mechanism.name}`]({Path(mechanism.path).name}) | {_escape(_summary(mechanism.row.fn))} |'
      for mechanism in mechanisms()
      if mechanism.kind == kind
    ]
    parts.append('\n'.join([f'| {kind} | equation and source |', '| --- | --- |', *lines]))
  return '\n\n'.join(parts) + '\n'


def mechanism_page(mechanism: Mechanism) -> str:
  """Returns the Markdown of the page of a mechanism."""
  kind, name, row = mechanism
  function = row.fn
  sections = [
    f'# {name}',
    _summary(function),
    _rest_of_docstring(function),
    f'Config: `config.model.attention.{kind}={name}`. Function: [`aj.{kind}s.{function.__name__}`]'
    f'[{function.__module__}.{function.__qualname__}].',
    f'```python\n{function.__name__}{_signature(function)}\n```',
    '## Weights',
    f'![Weights of {name} on the common example]({Path(mechanism.picture).name})',
    _caption(mechanism),
    '## Parameters, options and cost',
    _property_table(mechanism),
    _COST_NOTE,
  ]
  if name in ADVICE[kind]:
    sections += ['## When to use it', ADVICE[kind][name]]
  return '\n\n'.join(filter(None, sections)) + '\n'


def draw_picture(mechanism: Mechanism) -> bytes:
  """Returns a PNG of the weights on the example: at test time, and in training where they differ."""
  import matplotlib.pyplot as plt

  modes = {'at test': True, 'in training': False} if mechanism.row.at_test or _samples(mechanism.row) else {'': True}
  figure, axes = plt.subplots(1, len(modes), figsize=(5.2 * len(modes), 4.6), squeeze=False, layout='constrained')
  for axis, (title, deterministic) in zip(axes[0], modes.items(), strict=True):
    image = axis.imshow(example_weights(mechanism, deterministic), cmap='Blues', vmin=0, vmax=1)
    axis.scatter(*zip(*LINKS, strict=True), marker='s', s=180, facecolors='none', edgecolors='#e8590c', linewidths=0.8)
    axis.set_xticks(range(len(SOURCE)), SOURCE, rotation=60, ha='left', rotation_mode='anchor')
    axis.set_yticks(range(len(TARGET)), TARGET)
    axis.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0, labelsize=8)
    axis.set_xlabel(title)
  figure.colorbar(image, ax=axes[0].tolist(), shrink=0.6)
  written = io.BytesIO()
  figure.savefig(written, format='png', dpi=110)
  plt.close(figure)
  return written.getvalue()


def example_weights(mechanism: Mechanism, deterministic: bool = True) -> np.ndarray:
  """Returns the weights [T, S] on the example, with parameters that were fitted to its links.

  Args:
    mechanism: a score is shown with softmax, an alignment with the scores q · k / √D - 2.
    deterministic: whether to show the behaviour at test time.
  """
  example = make_example()
  variants = _variants(mechanism)
  params = _fit(
    aj.init_params(jax.random.key(1), **variants, query=FEATURES, key=FEATURES, features=FEATURES), variants
  )
  return np.asarray(_attend(params, variants, example, deterministic).weights)


@functools.cache
def make_example() -> PictureExample:
  """Returns queries and keys of which linked pairs are similar: a query is the sum of its linked keys and of noise."""
  links = np.zeros((len(TARGET), len(SOURCE)), np.float32)
  links[[target for _, target in LINKS], [source for source, _ in LINKS]] = 1
  rng = np.random.default_rng(0)
  key = rng.normal(size=(len(SOURCE), FEATURES)).astype(np.float32)
  noise = 0.5 * rng.normal(size=(len(TARGET), FEATURES)).astype(np.float32)
  return PictureExample(jnp.asarray(links @ key + noise), jnp.asarray(key), jnp.asarray(links))


def shifted_product(query, key):
  """The scores of the pictures of alignments: q · k / √D - 2, below 0 for most pairs that are not linked."""
  return scaled_dot(query, key) - 2.0


def _variants(mechanism: Mechanism) -> dict[str, str | Callable]:
  if mechanism.kind == 'score':
    return {'score': mechanism.name, 'alignment': 'softmax'}
  return {'score': shifted_product, 'alignment': mechanism.name}


def _attend(params, variants, example: PictureExample, deterministic: bool):
  options = {'params': params, 'rng': jax.random.key(0), 'deterministic': deterministic}
  return aj.attend(example.query, example.key, example.key, **variants, **options)


def _fit(params, variants):
  """Fits the parameters to the links of the example: -Σ log(w + 0.001) over the links, by Adam."""
  if not jax.tree.leaves(params):
    return params
  example = make_example()
  optimizer = optax.adam(0.05)

  def loss(params):
    weights = _attend(params, variants, example, True).weights
    return -jnp.sum(example.links * jnp.log(weights + 1e-3))

  def update(carry, _):
    params, state = carry
    updates, state = optimizer.update(jax.grad(loss)(params), state)
    return (optax.apply_updates(params, updates), state), None

  (params, _), _ = jax.jit(lambda carry: jax.lax.scan(update, carry, length=UPDATES))((params, optimizer.init(params)))
  return params


def _samples(row: Row) -> bool:
  return 'rng' in row.required_inputs


def _caption(mechanism: Mechanism) -> str:
  shown = (
    'The alignment is `softmax`.'
    if mechanism.kind == 'score'
    else 'The scores are q · k / √D − 2, as for every alignment.'
  )
  fitted = (
    f' Its parameters, and projections if it has any, were fitted to the links in {UPDATES} updates.'
    if mechanism.row.params or mechanism.row.project
    else ''
  )
  return (
    'The example of all pages: a sentence pair of Bahdanau et al. 2015 with links by hand (squares). No model is '
    f'trained: the query of a word is the vector of the words that it is linked with, plus noise. {shown}{fitted}'
  )


def _property_table(mechanism: Mechanism) -> str:
  row = mechanism.row
  options = {name: option for name, option in option_schema(row).items() if name not in row.params}
  partner = '`softmax`' if mechanism.kind == 'score' else '`scaled_dot`'  # as in `_implementations`
  rows = {
    'learned parameters': ', '.join(f'`{name}` {_shape(param.shape)}' for name, param in row.params.items()) or 'none',
    'options': ', '.join(f'`{name}={option.default}`' for name, option in options.items()) or 'none',
    'queries': 'in order: it depends on the number of the query or on earlier ones'
    if row.is_recurrent
    else 'in parallel',
    'at test time': f'`{row.at_test.__name__}`' if row.at_test else 'unchanged',
    f'implementations, with {partner}': ', '.join(f'`{name}`' for name in _implementations(mechanism)),
    f'parameters, all widths {COST_SIZE}': f'{_parameter_count(mechanism):,}',
    f'products for one query over {COST_SIZE} positions': f'{_query_flop(mechanism):,.0f} FLOP',
  }
  if mechanism.kind == 'score':
    rows['projections'] = 'query and key, by the caller, once each' if row.project else 'none'
  return '\n'.join(
    ['| property | value |', '| --- | --- |', *(f'| {key} | {_escape(value)} |' for key, value in rows.items())]
  )


def _implementations(mechanism: Mechanism) -> list[str]:
  """Returns the implementations that support a score with softmax, or an alignment with scaled_dot."""
  score = mechanism.row if mechanism.kind == 'score' else SCORES['scaled_dot']
  alignment = mechanism.row if mechanism.kind == 'alignment' else ALIGNMENTS['softmax']
  with compile_for('gpu'):  # independent of the devices of this machine
    return supported_implementations(score, alignment)


def _cost_params(mechanism: Mechanism):
  """Returns spec strings and the shapes of the parameters of the mechanism itself, without projections."""
  variants = {'score': 'dot', 'alignment': 'softmax'} | {mechanism.kind: mechanism.name}
  sizes = {'query': COST_SIZE, 'key': COST_SIZE, 'features': COST_SIZE}
  if 'max_positions' in mechanism.row.sizes:
    variants[mechanism.kind] = f'{mechanism.name}(max_positions={COST_SIZE})'
  params = jax.eval_shape(lambda: aj.init_params(jax.random.key(0), **variants, **sizes))
  return variants, {name: params.get(name, {}) for name in ('score', 'alignment')}


def _parameter_count(mechanism: Mechanism) -> int:
  return count_parameters(_cost_params(mechanism)[1])


def _query_flop(mechanism: Mechanism) -> float:
  """FLOP of the matrix products of one step, its context and its carry included; the memory is prepared before."""
  variants, params = _cost_params(mechanism)
  query, vectors = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((COST_SIZE,), (COST_SIZE, COST_SIZE)))

  def remember(params, vectors):
    return aj.remember(vectors, vectors, params=params, alignment=variants['alignment'])

  def step(params, query, memory):
    carry = aj.init_carry(*variants.values(), COST_SIZE)
    carry, attended = aj.attend_step(*variants.values(), params, carry, query, memory, rng=jax.random.key(0))
    return carry, attended.context

  memory = jax.eval_shape(remember, params, vectors)
  return matmul_flop(count_matmuls(step, params, query, memory))


def _signature(function: Callable) -> str:
  """The signature with shapes in place of the types of arrays: (query [D], key [S, D], *, w [Dq, Dk])."""
  parts = []
  for name, parameter in inspect.signature(function).parameters.items():
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY and '*' not in parts:
      parts.append('*')
    has_default = parameter.default is not inspect.Parameter.empty
    dimensions = getattr(parameter.annotation, 'dim_str', None)
    shape = '' if has_default or dimensions is None else f' {_shape(dimensions.split())}'
    parts.append(f'{name}{shape}' + (f'={parameter.default!r}' if has_default else ''))
  return f'({", ".join(parts)})'


def _shape(shape: tuple) -> str:
  return f'[{", ".join(map(str, shape))}]'


def _summary(function: Callable) -> str:
  return ' '.join(inspect.getdoc(function).split('\n\n')[0].split())


def _rest_of_docstring(function: Callable) -> str:
  """Returns the paragraphs of a docstring after the first, without the sections Args, Returns and Raises."""
  paragraphs = inspect.getdoc(function).split('\n\n')[1:]
  return '\n\n'.join(text for text in paragraphs if not text.startswith(('Args:', 'Returns:', 'Raises:')))


def _escape(text: str) -> str:
  return text.replace('|', '\\|')


_OVERVIEW = """A score measures how well a query matches each position of a memory; an alignment maps scores to weights.
Any score works with any alignment. Each page has the equation, the paper, the weights on one example that all pages
share, the cost, and when to use it. [All variants in one table](../docs/variants.md);
[how to add one](../docs/tutorials/variant.md)."""

_COST_NOTE = """Products are counted in the traced program and include the context, weights @ value. Projections by the
caller, computations made once per memory, convolutions and element-wise operations, such as exponentials, are not
counted. Measured times are in [the benchmarks](../lab/benchmarks.md)."""
