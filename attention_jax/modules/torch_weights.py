"""Weights of layers of torch and of models of Joey NMT under the names of this package.

A layout is a table of entries: the name of an array here (in this package), the names of its sources there (in the
other library), and the conversion. Each function of LAYOUTS makes the table of one kind of model from its arrays;
docs/interop.md lists the models.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attention_jax.errors import UserError, choose

Arrays = Mapping[str, np.ndarray]
Order = np.ndarray | slice
ALL = slice(None)
GRU_GATES = 3


class Entry(NamedTuple):
  """One array.

  Attributes:
    name: its name here.
    sources: names there.
    convert: makes the array from its sources.
  """

  name: str
  sources: tuple[str, ...]
  convert: Callable[..., np.ndarray]


def convert_weights(layout: str, arrays: Arrays, heads: int = 1) -> dict[str, np.ndarray]:
  """Returns the arrays of a torch state dict under the names of this package.

  Args:
    layout: a name of LAYOUTS.
    arrays: the state dict, as arrays of numpy.
    heads: number of attention heads, which the arrays do not determine; unused by layouts without multi-head attention.

  Raises:
    UserError: for an unknown layout, for arrays that are missing, unknown or cannot be represented, and for a number of
      heads that does not divide their width.
  """
  make_table, ignored = LAYOUTS[choose(layout, LAYOUTS, 'layout')]
  entries = list(make_table(arrays, heads))
  sources = {source for entry in entries for source in entry.sources}
  if missing := sorted(sources - arrays.keys()):
    raise _missing_error(layout, missing)
  if unknown := sorted(name for name in arrays.keys() - sources if not name.endswith(ignored)):
    raise UserError(f'{layout}: arrays that are not of this layout ({len(unknown)}): {", ".join(unknown[:3])}')
  return {entry.name: np.ascontiguousarray(entry.convert(*map(arrays.get, entry.sources))) for entry in entries}


def _missing_error(layout: str, missing: Sequence[str]) -> UserError:
  return UserError(f'{layout}: missing arrays ({len(missing)}): {", ".join(missing[:3])}')


def _dense(name: str, source: str, inputs: Order = ALL, outputs: Order = ALL) -> list[Entry]:
  """nn.Linear with a bias; `inputs` and `outputs` are the orders of its features here."""
  return [
    Entry(f'{name}.kernel', (f'{source}.weight',), lambda w: w.T[inputs][:, outputs]),
    Entry(f'{name}.bias', (f'{source}.bias',), lambda b: b[outputs]),
  ]


def _norm(name: str, source: str, order: Order = ALL) -> list[Entry]:
  return [
    Entry(f'{name}.scale', (f'{source}.weight',), lambda g: g[order]),
    Entry(f'{name}.bias', (f'{source}.bias',), lambda b: b[order]),
  ]


def _head_kernel(name: str, weight: str, bias: str, heads: int, part: int = 0, parts: int = 1, order: Order = ALL):
  """Kernel [N, D, F / N] and bias [N, F / N] of one of `parts` projections, whose rows are stacked in one weight."""

  def kernel(w):
    w = np.split(w, parts)[part].T[order]
    if heads < 1 or w.shape[1] % heads:
      raise UserError(
        f'{weight}: heads must be at least 1 and divide {w.shape[1]}, the width of all heads together, got {heads}'
      )
    return np.moveaxis(w.reshape(w.shape[0], heads, -1), 1, 0)

  return [
    Entry(f'{name}.kernel', (weight,), kernel),
    Entry(f'{name}.bias', (bias,), lambda b: np.split(b, parts)[part].reshape(heads, -1)),
  ]


def _torch_attention(name: str, source: str, heads: int) -> list[Entry]:
  """nn.MultiheadAttention, whose query, key and value have the same width."""
  weight = f'{source}in_proj_weight'
  bias = f'{source}in_proj_bias'
  entries = _dense(f'{name}join', f'{source}out_proj')
  for part, side in enumerate(('query', 'key', 'value')):
    entries += _head_kernel(f'{name}{side}_kernel', weight, bias, heads, part, 3)
  return entries


def _layers(arrays: Arrays, prefix: str) -> range:
  """Numbers of the layers whose names begin with `prefix`."""
  numbers = [int(match[1]) for name in arrays if (match := re.match(rf'{re.escape(prefix)}(\d+)', name))]
  return range(max(numbers, default=-1) + 1)


def multihead_attention(arrays: Arrays, heads: int) -> list[Entry]:
  """nn.MultiheadAttention as Attention('scaled_dot', heads=N, project_values=True, bias=True)."""
  return _torch_attention('', '', heads)


def transformer(arrays: Arrays, heads: int) -> Iterable[Entry]:
  """nn.Transformer as an encoder and a decoder with bias=True and, unless norm_first, normalize_last=True."""
  sublayers = {'encoder': {'attention': 'self_attn'}, 'decoder': {'attention': 'self_attn', 'cross': 'multihead_attn'}}
  for side, attentions in sublayers.items():
    for layer in _layers(arrays, f'{side}.layers.'):
      name = f'{side}.blocks_{layer}'
      source = f'{side}.layers.{layer}'
      for attention, torch_attention in attentions.items():
        yield from _torch_attention(f'{name}.{attention}.', f'{source}.{torch_attention}.', heads)
      for number in range(2):
        yield from _dense(f'{name}.feed.Dense_{number}', f'{source}.linear{number + 1}')
      for number in range(len(attentions) + 1):
        yield from _norm(f'{name}.residuals_{number}.LayerNorm_0', f'{source}.norm{number + 1}')
    yield from _norm(f'{side}.final_norm', f'{side}.norm')


def _recurrent(name: str, source: str, suffix: str, columns: Order = ALL, gates: int = GRU_GATES) -> list[Entry]:
  """One layer and direction of nn.GRU, or of nn.LSTM with 4 gates; `columns` selects columns of weight_ih."""
  weight_ih, weight_hh, bias_ih, bias_hh = (
    f'{source}.{kind}_{side}_{suffix}' for kind in ('weight', 'bias') for side in ('ih', 'hh')
  )

  def input_bias(b_ih, b_hh):
    # The bias of the new state of a GRU is multiplied by the reset gate, and stays a parameter of its own.
    b_hh = np.split(b_hh, gates)
    return b_ih + np.concatenate([*b_hh[:-1], np.zeros_like(b_hh[-1]) if gates == GRU_GATES else b_hh[-1]])

  def recurrent_bias(b_hh):
    last = np.split(b_hh, gates)[-1]
    return last if gates == GRU_GATES else np.zeros_like(last)

  return [
    Entry(f'{name}.inputs.kernel', (weight_ih,), lambda w: w.T[columns]),
    Entry(f'{name}.inputs.bias', (bias_ih, bias_hh), input_bias),
    Entry(f'{name}.kernel', (weight_hh,), lambda w: w.T),
    Entry(f'{name}.bias', (bias_hh,), recurrent_bias),
  ]


def bahdanau(arrays: Arrays, heads: int) -> list[Entry]:
  """The attention decoder of torch's tutorial: params of aj.attend, a RecurrentCell, an embedding and a linear layer.

  The projections of query and key have biases there. Their sum is one bias inside of the tanh, attention.score.bias.
  SCORES has no such row, so the caller must define one. The bias of the scores changes no weight and is dropped.
  """
  return [
    Entry('attention.query', ('attention.Wa.weight',), np.transpose),
    Entry('attention.key', ('attention.Ua.weight',), np.transpose),
    Entry('attention.score.v', ('attention.Va.weight', 'attention.Va.bias'), lambda w, b: w[0]),
    Entry('attention.score.bias', ('attention.Wa.bias', 'attention.Ua.bias'), np.add),
    Entry('embedding', ('embedding.weight',), np.asarray),
    *_recurrent('cell', 'gru', 'l0'),
    *_dense('output', 'out'),
  ]


# Joey NMT numbers <unk> 0, <pad> 1, <s> 2 and </s> 3; here these are 3, 0, 1 and 2 (tokens.py).
SPECIAL_ROWS = (1, 2, 3, 0)


def _token_order(rows: int) -> np.ndarray:
  return np.array([*SPECIAL_ROWS, *range(len(SPECIAL_ROWS), rows)])


def _joeynmt_vocabularies(order: Order = ALL) -> list[Entry]:
  """Embeddings and the output layer, whose rows are put into the order of the ids of this package."""

  def table(w):
    return w[_token_order(len(w))][:, order]

  output = ('decoder.output_layer.weight',)
  return [
    Entry('encoder.embedding.table.embedding', ('src_embed.lut.weight',), table),
    Entry('embedding.table.embedding', ('trg_embed.lut.weight',), table),
    Entry('output.kernel', output, lambda w: table(w).T),
    Entry('output.bias', output, lambda w: np.zeros(len(w), w.dtype)),
  ]


def joeynmt_recurrent(arrays: Arrays, heads: int) -> Iterable[Entry]:
  """Joey NMT with a recurrent encoder and decoder and input feeding, as birnn and luong(readout_bias=True).

  Raises:
    UserError: for an LSTM with a bridge, whose first cell state has a tanh there but not here, and if a side has no
      recurrent layer.
  """
  width, gates = _recurrent_sizes(arrays, 'decoder')
  _, encoder_gates = _recurrent_sizes(arrays, 'encoder')
  layers = _layers(arrays, 'encoder.rnn.weight_hh_l')
  for layer in layers:
    for direction, suffix in enumerate(('', '_reverse')):
      cell = f'encoder.RecurrentLayer_{2 * layer + direction}.RecurrentCell_0'
      yield from _recurrent(cell, 'encoder.rnn', f'l{layer}{suffix}', gates=encoder_gates)
  cell = 'decoder.cell'
  decoder_layers = _layers(arrays, 'decoder.rnn.weight_hh_l')
  embedding = slice(0, -width)
  for layer in decoder_layers:
    columns = embedding if layer == 0 else ALL
    yield from _recurrent(f'{cell}.stack.cells_{layer}', 'decoder.rnn', f'l{layer}', columns, gates)
  yield Entry(f'{cell}.feed_gates.kernel', ('decoder.rnn.weight_ih_l0',), lambda w: w.T[-width:])
  vector = 'decoder.att_vector_layer'
  # The state comes first there, the context first here.
  yield Entry(f'{cell}.attentional.kernel', (f'{vector}.weight',), lambda w: np.concatenate([w.T[width:], w.T[:width]]))
  yield Entry(f'{cell}.attentional.bias', (f'{vector}.bias',), np.asarray)
  yield from _joeynmt_scores(arrays, f'{cell}.attention')
  if 'decoder.bridge_layer.weight' in arrays:
    if gates != GRU_GATES:
      raise UserError("joeynmt_recurrent: the bridge of an LSTM cannot be represented; expected init_hidden 'zero'")
    for layer in decoder_layers:
      yield from _joeynmt_bridge(f'{cell}.stack.bridges_{layer}_0', len(layers), encoder_gates)
  yield from _joeynmt_vocabularies()


def _recurrent_sizes(arrays: Arrays, side: str) -> tuple[int, int]:
  """Width of the encoder (of one direction) or of the decoder, and the number of gates of its layers."""
  name = f'{side}.rnn.weight_hh_l0'
  if name not in arrays:
    raise _missing_error('joeynmt_recurrent', [name])
  rows, width = arrays[name].shape
  return width, rows // width


def _joeynmt_scores(arrays: Arrays, name: str) -> list[Entry]:
  """The score 'additive' of attention 'bahdanau', or 'general' of attention 'luong'."""
  key = 'decoder.attention.key_layer.weight'
  query = 'decoder.attention.query_layer.weight'
  if query not in arrays:
    return [Entry(f'{name}.score_params.w', (key,), lambda w: w[None])]
  return [
    Entry(f'{name}.key_kernel.kernel', (key,), lambda w: w.T[None]),
    Entry(f'{name}.query_kernel.kernel', (query,), lambda w: w.T[None]),
    Entry(f'{name}.score_params.v', ('decoder.attention.energy_layer.weight',), np.asarray),
  ]


def _joeynmt_bridge(name: str, encoder_layers: int, encoder_gates: int) -> list[Entry]:
  """The bridge. There it reads the last outputs of the top encoder layer alone; here the last states of all layers."""

  def kernel(w):
    directions = np.split(w.T, 2)
    if encoder_gates != GRU_GATES:  # the state of a direction is its output and its cell
      directions = [np.concatenate([rows, np.zeros_like(rows)]) for rows in directions]
    last_layer = np.concatenate(directions)
    return np.concatenate([np.zeros_like(last_layer)] * (encoder_layers - 1) + [last_layer])

  source = 'decoder.bridge_layer'
  return [
    Entry(f'{name}.kernel', (f'{source}.weight',), kernel),
    Entry(f'{name}.bias', (f'{source}.bias',), np.asarray),
  ]


def joeynmt_transformer(arrays: Arrays, heads: int) -> Iterable[Entry]:
  """Joey NMT with Transformers on both sides, with bias=True and epsilon=1e-6.

  Sines and cosines of its positions alternate; here all sines come first. The features of the embeddings, and of all
  that is added to them, are therefore put into another order, which changes no result.
  """
  features = arrays['src_embed.lut.weight'].shape[1] if 'src_embed.lut.weight' in arrays else 0
  order = np.concatenate([np.arange(0, features, 2), np.arange(1, features, 2)])
  norms = {
    'encoder': ('layer_norm', 'feed_forward.layer_norm'),
    'decoder': ('x_layer_norm', 'dec_layer_norm', 'feed_forward.layer_norm'),
  }
  attentions = {
    'encoder': {'attention': 'src_src_att'},
    'decoder': {'attention': 'trg_trg_att', 'cross': 'src_trg_att'},
  }
  for side in ('encoder', 'decoder'):
    for layer in _layers(arrays, f'{side}.layers.'):
      name = f'{side}.blocks_{layer}'
      source = f'{side}.layers.{layer}'
      for attention, joeynmt_attention in attentions[side].items():
        yield from _joeynmt_attention(f'{name}.{attention}', f'{source}.{joeynmt_attention}', heads, order)
      feed = f'{source}.feed_forward.pwff_layer'
      yield from _dense(f'{name}.feed.Dense_0', f'{feed}.0', inputs=order)
      yield from _dense(f'{name}.feed.Dense_1', f'{feed}.3', outputs=order)
      for number, norm in enumerate(norms[side]):
        yield from _norm(f'{name}.residuals_{number}.LayerNorm_0', f'{source}.{norm}', order)
    if f'{side}.layer_norm.weight' in arrays:
      yield from _norm(f'{side}.final_norm', f'{side}.layer_norm', order)
  yield from _joeynmt_vocabularies(order)


def _joeynmt_attention(name: str, source: str, heads: int, order: Order) -> list[Entry]:
  entries = _dense(f'{name}.join', f'{source}.output_layer', outputs=order)
  for side in ('query', 'key', 'value'):
    layer = f'{source}.{side[0]}_layer'
    entries += _head_kernel(f'{name}.{side}_kernel', f'{layer}.weight', f'{layer}.bias', heads, order=order)
  return entries


class Layout(NamedTuple):
  """A row of LAYOUTS.

  Attributes:
    entries: (arrays, heads) -> the table of entries.
    ignored: suffixes of the names of arrays that are not weights.
  """

  entries: Callable[[Arrays, int], Iterable[Entry]]
  ignored: tuple[str, ...] = ()


LAYOUTS: Mapping[str, Layout] = {
  'multihead_attention': Layout(multihead_attention),
  'transformer': Layout(transformer),
  'bahdanau': Layout(bahdanau),
  'joeynmt_recurrent': Layout(joeynmt_recurrent),
  'joeynmt_transformer': Layout(joeynmt_transformer, ('pe.pe',)),
}
