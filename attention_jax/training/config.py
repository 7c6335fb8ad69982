"""The fields of a config, with their defaults taken from where each is used."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from attention_jax.errors import UserError
from attention_jax.models.ranking import DEFAULT, Ranking
from attention_jax.models.seq2seq import Model
from attention_jax.modules.attention import Attention
from attention_jax.training.loop import Training


@dataclasses.dataclass(frozen=True)
class Source:
  """The fields of `config.data`.

  Attributes:
    task: a spec of data.tasks.TASKS.
    folder: what relative paths in the task start from; where tfds sets are.
    vocabulary: a spec of data.vocab.VOCABULARIES.
    shared_vocabulary: one vocabulary for both sides.
    buckets: (source, target) lengths, the end-of-sentence token included; each is one compilation.
    batch_size, batch_unit: rows of a batch ('sentences'), or its tokens ('tokens').
  """

  task: str = 'dates'
  folder: str = 'data'
  vocabulary: str = 'char'
  shared_vocabulary: bool = False
  buckets: tuple[tuple[int, int], ...] = ((42, 11),)
  batch_size: int = 128
  batch_unit: str = 'sentences'


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """The fields of `config.evaluation`.

  Attributes:
    metrics: specs of training.metrics.METRICS.
    group_references: whether rows with the same source are one question with several right answers.
    beams: of the search at the end of training and in evaluate.py; 1 is greedy. Validation while training is greedy.
    alpha, beta, gamma: of the ranking of hypotheses, see models.search.Ranking: the length penalty
      ((5 + length) / 6)^alpha, the coverage penalty and the end-of-sentence normalisation; 0 is none.
    max_length: of hypotheses; 0 is the longest target of the buckets.
    batch_size: sources searched at once.
  """

  metrics: tuple[str, ...] = ('exact_match', 'character_error_rate')
  group_references: bool = False
  beams: int = 5
  alpha: float = DEFAULT.alpha
  beta: float = DEFAULT.beta
  gamma: float = DEFAULT.gamma
  max_length: int = 0
  batch_size: int = 128

  def __post_init__(self):
    for name, least in {'beams': 1, 'alpha': 0, 'beta': 0, 'gamma': 0, 'max_length': 0, 'batch_size': 1}.items():
      if not least <= getattr(self, name) < math.inf:
        raise UserError(f'evaluation.{name} is {getattr(self, name)}; possible: {least} or more, and finite')

  @property
  def ranking(self) -> Ranking:
    """What the search ranks finished hypotheses by."""
    return Ranking(self.alpha, self.beta, self.gamma)


def default_config() -> ConfigDict:
  """Every field there is, at its default."""
  config = ConfigDict({'data': _fields(Source), 'model': _fields(Model), 'training': _fields(Training)})
  decoders_say = ('project_values', 'positions', 'dtype', 'parent', 'name')
  config.model.attention = ConfigDict(_fields(Attention, without=decoders_say))
  config.evaluation = ConfigDict(_fields(Evaluation))
  config.seeds = 1  # runs trained side by side, with training.seed and the seeds that follow it
  return config


def complete(config: Mapping[str, Any], where: str) -> dict[str, Any]:
  """`config` with the defaults of the fields it lacks, as one of an earlier version may.

  Raises: UserError for fields that there are not.
  """
  given, known = (flatten_dict(c, sep='.') for c in (config, default_config().to_dict()))
  if unknown := sorted(set(given) - set(known)):
    raise UserError(f'{where} has {", ".join(unknown)}; possible: the fields of training.config.default_config()')
  return unflatten_dict(known | given, sep='.')


def _fields(cls: type, without: tuple[str, ...] = ()) -> dict[str, Any]:
  return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in without}
