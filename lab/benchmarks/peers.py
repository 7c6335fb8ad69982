"""The same formulas in PyTorch, as its users would write them, on the device of jax.

Functions that return sides or a difference return {} or None if torch is not installed or does not support that device.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # idle threads that spin would slow down the next side

import jax
import numpy as np

from attention_jax.tokens import EOS
from lab.benchmarks.measure import Side

try:
  import torch
except ImportError:
  torch = None

VERSION = f'PyTorch {torch.__version__}' if torch else 'no PyTorch (pip install -r lab/requirements.txt)'


@functools.cache
def is_available() -> bool:
  """Returns whether PyTorch runs on the device of jax, which becomes its default device.

  On a GPU float32 products are computed in TF32, as those of jax are.
  """
  platform = jax.default_backend()
  if torch is None or platform not in ('cpu', 'gpu'):
    return False
  if platform == 'cpu':
    return True
  if not torch.cuda.is_available():
    return False
  torch.set_default_device('cuda')
  torch.set_float32_matmul_precision('high')
  return True


def describe() -> str:
  """Returns the version that is compared with, or 'nothing'."""
  return VERSION if is_available() else 'nothing'


def _side(run: Callable[[], Any]) -> Side:
  """Returns a side that waits for the GPU, if there is one."""
  if jax.default_backend() == 'cpu':
    return Side(run)
  return Side(run, wait=lambda output: torch.cuda.synchronize())


def attention(
  log: Callable[[str], None] | None, score: str, causal: bool, query, key, value, params: Mapping[str, Any]
) -> dict[str, dict[str, Side]]:
  """Returns the sides of one score.

  Args:
    log: called with a line if torch.compile does not work; None leaves torch.compile out.
    score: a key of FORMULAS.
    causal: whether the mask is causal, for 'scaled_dot' alone; other scores are not masked.
    query, key, value: arrays [B, N, T or S, F].
    params: parameters of the score.

  Returns:
    {'torch': {'forward': side, 'forward and backward': side}, ...}.
  """
  if not is_available():
    return {}
  inputs = [_to_tensor(x) for x in (query, key, value)]
  tensors = {name: _to_tensor(param).to(inputs[0].dtype).requires_grad_() for name, param in params.items()}
  formulas = FORMULAS[score](log, inputs, tensors, causal)
  return {
    name: {
      'forward': _forward(formula, inputs),
      'forward and backward': _forward_and_backward(formula, inputs, list(tensors.values())),
    }
    for name, formula in formulas.items()
  }


def _to_tensor(x) -> Any:
  """Returns an array as a tensor of the same dtype."""
  return torch.tensor(np.asarray(x, np.float32)).to(getattr(torch, str(x.dtype)))


def _additive(log, inputs, params, causal) -> dict[str, Callable]:
  def formula(query, key, value):
    scores = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ params['v']
    return torch.softmax(scores, -1) @ value

  if log is None:
    return {'torch': formula}
  compiled = torch.compile(formula)
  try:
    compiled(*inputs)
  except Exception as error:  # it needs a C++ compiler and raises errors of its own
    log(f'torch.compile does not work on this machine and is left out: {type(error).__name__}')
    return {'torch': formula}
  return {'torch': formula, 'torch.compile': compiled}


def _scaled_dot(log, inputs, params, causal) -> dict[str, Callable]:
  return {'torch sdpa': functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)}


def _recurrent_additive(feature: Callable, params, update: Callable) -> dict[str, Callable]:
  """Additive attention, one query at a time, whose scores depend on the weights of the queries before.

  Args:
    feature: state [..., S] -> what is added to the keys [..., S, F].
    params: parameters of the score.
    update: (state, weights) -> the next state.
  """

  def formula(query, key, value):
    state = torch.zeros_like(key[..., 0])
    contexts = []
    for single_query in query.unbind(-2):
      scores = torch.tanh(single_query.unsqueeze(-2) + key + feature(state)) @ params['v']
      weights = torch.softmax(scores, -1)
      state = update(state, weights)
      contexts.append((weights.unsqueeze(-2) @ value).squeeze(-2))
    return torch.stack(contexts, -2)

  return {'torch': formula}


def _coverage(log, inputs, params, causal) -> dict[str, Callable]:
  return _recurrent_additive(lambda coverage: coverage.unsqueeze(-1) * params['u'], params, torch.add)


def _location_sensitive(log, inputs, params, causal) -> dict[str, Callable]:
  def feature(weights):
    filters = params['filters'].flip(-1).unsqueeze(1)  # ours is a true convolution; conv1d does not flip
    rows = weights.reshape(-1, 1, weights.shape[-1])
    channels = torch.nn.functional.conv1d(rows, filters, padding=filters.shape[-1] // 2)
    return (channels.mT @ params['u']).reshape(*weights.shape, -1)

  return _recurrent_additive(feature, params, lambda _, weights: weights)


FORMULAS = {
  'additive': _additive,
  'coverage': _coverage,
  'location_sensitive': _location_sensitive,
  'scaled_dot': _scaled_dot,
}


def _forward(formula: Callable, inputs) -> Side:
  def run():
    with torch.no_grad():
      return formula(*inputs)

  return _side(run)


def _forward_and_backward(formula: Callable, inputs, params) -> Side:
  leaves = [x.clone().requires_grad_() for x in inputs]
  return _side(lambda: torch.autograd.grad(torch.sin(formula(*leaves)).sum(), [*leaves, *params]))


def build_model(name: str, sizes: Mapping[str, Any]):
  """Returns a model of torch_model.py or torch_transformer.py."""
  from lab.benchmarks import torch_model, torch_transformer

  torch.manual_seed(0)
  return (getattr(torch_model, name, None) or getattr(torch_transformer, name))(**sizes)


def difference(params, logits, batch, sizes: Mapping[str, Any]) -> float | None:
  """Compares logits with those of PyTorch's Transformer with the same parameters.

  PyTorch computes in float64, so that its own rounding does not count.

  Args:
    params: parameters of our model.
    logits: logits of our model [B, T, V].
    batch: (source, target) ids.
    sizes: sizes of the model.

  Returns:
    The largest absolute difference, or None without torch.
  """
  if not is_available():
    return None
  model = build_model('Transformer', sizes).eval()
  model.load_jax_params(params)
  model.double()
  with torch.no_grad():
    torch_logits = model.logits(*(torch.tensor(np.asarray(x), dtype=torch.long) for x in batch))
  return float(np.abs(torch_logits.cpu().numpy() - np.asarray(logits)).max())


def make_translator(params, sizes: Mapping[str, Any], beams: int, longest: int, dtype: str) -> Callable:
  """Returns a function that translates by torch_model.Bahdanau with the parameters of our model.

  Args:
    params: parameters of our model.
    sizes: sizes of the model.
    beams: beam size, 1 for greedy search.
    longest: maximum number of tokens of an output.
    dtype: dtype of the computation.

  Returns:
    padded source ids [B, S] -> the target ids of each source, without EOS.
  """
  model = build_model('Bahdanau', sizes).eval()
  model.load_jax_params(params)

  def run(source):
    with torch.inference_mode(), _computing_in(dtype):
      return model.translate(torch.tensor(source, dtype=torch.long), beams, longest)

  return run


COMPILED_METHODS = {'Bahdanau': 'recur', 'Luong': 'loss', 'Transformer': 'loss'}  # compiled by torch.compile


def _computing_in(dtype: str) -> contextlib.AbstractContextManager:
  """Autocasts products to bfloat16 if that is the dtype; parameters stay float32."""
  return torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=dtype == 'bfloat16')


def train_step(name: str, batch, sizes: Mapping[str, Any], dtype: str) -> Side | None:
  """Returns one update of a model; None without torch.

  Args:
    name: a class of torch_model.py or torch_transformer.py.
    batch: (source [B, S], target [B, T]), ids with 0 for padding.
    sizes: the arguments of that class.
    dtype: dtype of the products, 'float32' or 'bfloat16'.
  """
  return _side(_make_update(build_model(name, sizes), batch, dtype)) if is_available() else None


def compiled_train_step(
  log: Callable[[str], None], name: str, batch, sizes: Mapping[str, Any], dtype: str
) -> Side | None:
  """Returns the update of `train_step`, compiled by torch.compile; None without torch or if compiling fails.

  Args:
    log: called with a line if torch.compile does not work.
    name, batch, sizes, dtype: as in `train_step`.
  """
  if not is_available():
    return None
  model = build_model(name, sizes)
  method = COMPILED_METHODS[name]
  setattr(model, method, torch.compile(getattr(model, method)))
  update = _make_update(model, batch, dtype)
  try:
    update()
  except Exception as error:  # it needs a C++ compiler and raises errors of its own
    log(f'torch.compile does not work on this machine and is left out: {type(error).__name__}')
    return None
  return _side(update)


def _make_update(model, batch, dtype: str) -> Callable[[], None]:
  optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
  source, target = (torch.tensor(np.asarray(x), dtype=torch.long) for x in batch)

  def run():
    optimizer.zero_grad(set_to_none=True)
    with _computing_in(dtype):
      loss = model.loss(source, target)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

  return run


def decode(source, sizes: Mapping[str, Any], beams: int, steps: int, dtype: str) -> Side | None:
  """Returns a beam search of exactly `steps` steps by torch_model.Bahdanau; None without torch.

  Args:
    source: ids [B, S], 0 for padding.
    sizes: sizes of the model.
    beams: beam size, 1 for greedy search.
    steps: number of decoding steps; no hypothesis ends before.
    dtype: dtype of the products, 'float32' or 'bfloat16'.
  """
  if not is_available():
    return None
  model = build_model('Bahdanau', sizes).eval()
  source = torch.tensor(np.asarray(source), dtype=torch.long)
  with torch.no_grad():
    model.output.bias[EOS] = -1e9  # no hypothesis ends, so that all steps are made

  def run():
    with torch.inference_mode(), _computing_in(dtype):
      return model.translate(source, beams, steps)

  return _side(run)
