"""Readings: the attention weights of a trained model for one source and one target, and the analyses of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from attention_jax.pharaoh import Link

WEIGHTS = 'weights'


class Measurement(NamedTuple):
  """Result of an analysis.

  Attributes:
    values: an array with an axis for each entry of `axes`.
    axes: for each axis, the names of its entries, such as tokens.
    is_map: whether the axes are those of weights: the target tokens, then the source tokens. The axes alone do not
      determine it, because a source may equal its target.
  """

  values: np.ndarray
  axes: tuple[Sequence[str], ...]
  is_map: bool = False


class ReadingRequest(NamedTuple):
  """Which readings to compute.

  Attributes:
    split: name of the split.
    rows: numbers of rows of the split, counted from 0, as text; empty for the first four rows.
    inputs: new inputs, which replace the rows unless empty.
    layers: whether to add the weights of every layer and head.
    analyses: specs of analysis.analyses.ANALYSES.
    hypotheses: number of hypotheses for each input, at most the beam size; 1 for rows.
    words: whether to merge the weights of subwords or characters to those of words.
    edit: a spec of functional.edits.EDITS that edits the weights of the model; '' for none.
  """

  split: str = 'test'
  rows: Sequence[str] = ()
  inputs: Sequence[str] = ()
  layers: bool = False
  analyses: Sequence[str] = ()
  hypotheses: int = 1
  words: bool = False
  edit: str = ''


class Reading(NamedTuple):
  """One source and one target.

  Attributes:
    name: name of the example; the hypotheses of one source have the same name.
    source: text of the source.
    target: text of the target.
    source_tokens: S tokens, EOS included.
    target_tokens: T tokens, EOS included, but for a hypothesis that was cut off before EOS.
    matrices: weights [T, S] by name: WEIGHTS are those of the model, the others those of layers and heads.
    gold: possible (source, target) links, which include the sure ones; None if the example has no gold links.
    sure: the sure links; None if all links are sure.
    score: ranking score of a hypothesis; None for a reference.
    measurements: results of analyses by their specs.
    run: the folder of the run whose model computed the weights, and the edit of these weights, if any; '' before
      `read_runs` sets it.
  """

  name: str
  source: str
  target: str
  source_tokens: Sequence[str]
  target_tokens: Sequence[str]
  matrices: Mapping[str, np.ndarray]
  gold: Sequence[Link] | None = None
  score: float | None = None
  measurements: Mapping[str, Measurement] = {}
  run: str = ''
  sure: Sequence[Link] | None = None

  @property
  def weights(self) -> np.ndarray:
    """The weights of the model."""
    return self.matrices[WEIGHTS]

  @property
  def maps(self) -> dict[str, np.ndarray]:
    """The measurements with an entry for each pair of a target and a source token, [T, S], by their specs."""
    shape = (len(self.target_tokens), len(self.source_tokens))
    return {
      spec: measured.values
      for spec, measured in self.measurements.items()
      if measured.is_map and measured.values.shape == shape
    }


@runtime_checkable
class SupportsReadings(Protocol):
  """A system that returns readings: attention weights, those of each layer and head, and analyses of them."""

  def read(self, params: Any, request: ReadingRequest) -> list[Reading]:
    """Returns the readings of a request by a model with these parameters."""


def read_runs(runs: Sequence[Any], request: ReadingRequest) -> list[Reading]:
  """Returns the readings of a request by each run; with an edit, the unedited readings of a run come first.

  Args:
    runs: runs of systems with readings, as systems.runs.open_run returns them.
    request: which readings to compute.

  Raises:
    UserError: as the system does.
  """
  unedited = request._replace(edit='')
  requests = {'': unedited} | ({f', {request.edit}': request} if request.edit else {})
  return [
    reading._replace(run=f'{run.folder}{suffix}')
    for run in runs
    for suffix, part in requests.items()
    for reading in run.system.read(run.params, part)
  ]


def to_record(reading: Reading, digits: int = 4) -> dict[str, Any]:
  """Returns a reading as a JSON object, with arrays rounded to this number of significant digits."""
  return {
    'run': reading.run,
    'name': reading.name,
    'source': reading.source,
    'target': reading.target,
    'score': reading.score,
    'source_tokens': list(reading.source_tokens),
    'target_tokens': list(reading.target_tokens),
    'gold': None if reading.gold is None else np.asarray(reading.gold).tolist(),
    'sure': None if reading.sure is None else np.asarray(reading.sure).tolist(),
    'matrices': {name: rounded(values, digits) for name, values in reading.matrices.items()},
    'measurements': {
      spec: {'axes': [list(axis) for axis in measured.axes], 'values': rounded(measured.values, digits)}
      for spec, measured in reading.measurements.items()
    },
  }


def rounded(values: np.ndarray, digits: int) -> Any:
  """Returns nested lists of numbers with this number of significant digits; None for NaN and ±∞, which JSON lacks."""
  round_one = np.vectorize(lambda x: float(f'{x:.{digits}g}') if np.isfinite(x) else None, otypes=[object])
  values = np.asarray(values, np.float64)
  return round_one(values).tolist() if values.size else values.tolist()
