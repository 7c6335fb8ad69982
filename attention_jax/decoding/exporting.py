"""Exports a trained model as files that do not need this package: its search and steps (jax.export), and its weights.

The functions share one file of weights. Their first argument is a dictionary of these weights, whose names are those of
docs/interop.md. The size of the batch is symbolic, and so is the number of source positions, unless the request fixes
it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from attention_jax.atomic import write_bytes
from attention_jax.decoding.compiled_search import BeamSearch, compile_search
from attention_jax.decoding.constraints import NO_CONSTRAINTS, Constraints
from attention_jax.decoding.ranking import Ranking
from attention_jax.errors import UserError
from attention_jax.models.encoder_decoder import EncoderDecoder
from attention_jax.modules.parameter_files import flatten_names, save_weights, unflatten_names

WEIGHTS_FILE = 'weights.safetensors'
SUFFIX = '.jax_export'


class ExportRequest(NamedTuple):
  """Options of an export.

  Attributes:
    max_length: maximum number of tokens of a hypothesis, EOS included.
    beams: beam size of the search.
    ranking: ranking of its hypotheses.
    source_length: number of positions of every source, padding included; 0 for any.
    platforms: platforms of jax on which the functions run.
    constraints: constraints on its hypotheses.
  """

  max_length: int
  beams: int
  ranking: Ranking
  source_length: int = 0
  platforms: Sequence[str] = ('cpu',)
  constraints: Constraints = NO_CONSTRAINTS


def export_decoder(model: EncoderDecoder, params: Any, request: ExportRequest) -> dict[str, export.Exported]:
  """Exports the functions of a model.

  Args:
    model: the model.
    params: its parameters.
    request: options of the export.

  Returns:
    Three functions by name:
    search: (weights, source [B, S], source_mask [B, S]) -> the fields of Hypotheses by name: 'tokens' [B, K, T],
      'scores', 'log_probs' and 'lengths' [B, K], 'weights' [B, K, T, S].
    start: (weights, source, source_mask) -> carry, memory; tuples of arrays.
    step: (weights, carry, token [B], memory) -> carry, logits [B, V] ([B, V + S] if the model copies), attention
      weights [B, S].

  Raises:
    UserError: for a model that needs a fixed number of source positions, without `source_length`; for `beams` or
      `max_length` below 1, and for lengths that the model does not accept.
  """
  if model.copies and not request.source_length:
    raise UserError('the logits of a model that copies have an entry for each source position; set source_length')
  shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in flatten_names(params).items()}
  batch, positions = export.symbolic_shape('b, s')
  size = request.source_length or positions
  source = jax.ShapeDtypeStruct((batch, size), jnp.int32)
  mask = jax.ShapeDtypeStruct((batch, size), jnp.bool_)
  search = compile_search(
    model, BeamSearch(request.beams), request.max_length, request.ranking, constraints=request.constraints
  )
  trees = {}  # of the carry and the memory; set when `start` is traced, before `step` is

  def run_search(weights: Mapping[str, Any], source, mask):
    return search(unflatten_names(weights, params), source, mask)._asdict()

  def start(weights: Mapping[str, Any], source, mask):
    variables = {'params': unflatten_names(weights, params)}
    carry, memory = model.apply(variables, source, mask, request.max_length, method='start')
    trees.update(carry=jax.tree.structure(carry), memory=jax.tree.structure(memory))
    return tuple(jax.tree.leaves(carry)), tuple(jax.tree.leaves(memory))

  def step(weights: Mapping[str, Any], carry, token, memory):
    carry = jax.tree.unflatten(trees['carry'], carry)
    memory = jax.tree.unflatten(trees['memory'], memory)
    variables = {'params': unflatten_names(weights, params)}
    carry, output = model.apply(variables, carry, token, memory, method='step')
    return tuple(jax.tree.leaves(carry)), output.logits, output.weights

  def export_function(fn: Callable, *arguments) -> export.Exported:
    return export.export(jax.jit(fn), platforms=tuple(request.platforms))(shapes, *arguments)

  try:
    carry, memory = jax.eval_shape(start, shapes, source, mask)
    token = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return {
      'search': export_function(run_search, source, mask),
      'start': export_function(start, source, mask),
      'step': export_function(step, carry, token, memory),
    }
  except (jax.errors.InconclusiveDimensionOperation, NotImplementedError) as error:
    # NotImplementedError: jax has no associative scan over symbolic positions.
    if isinstance(error, NotImplementedError) and request.source_length:
      raise
    reason = str(error).split('.')[0]
    raise UserError(f'the model needs a fixed number of source positions; set source_length ({reason})') from None


def write_export(exported: Mapping[str, export.Exported], params: Any, folder: Path) -> None:
  """Writes exported functions and the weights into a folder.

  Args:
    exported: functions by name, as `export_decoder` returns them.
    params: the parameters of the model.
    folder: an existing folder.

  Raises:
    UserError: if flatbuffers, which serialises the functions, or safetensors is not installed.
  """
  try:
    import flatbuffers  # noqa: F401 - which jax.export imports
    import safetensors  # noqa: F401 - which writes the weights
  except ImportError as error:
    raise UserError(f"exports need the package {error.name}; pip install 'attention_jax[interop]'") from None
  save_weights(params, folder / WEIGHTS_FILE)
  for name, function in exported.items():
    write_bytes(folder / f'{name}{SUFFIX}', bytes(function.serialize()))
