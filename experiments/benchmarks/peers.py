"""The same work in PyTorch, as its users would write it. Nothing of it where torch is not installed."""

import functools
import os
from collections.abc import Callable

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # threads that spin while they wait slow down whoever comes next

import numpy as np

from attention_jax.tokens import EOS
from experiments.benchmarks.measure import Side

try:
  import torch
except ImportError:
  torch = None

VERSION = f'PyTorch {torch.__version__}' if torch else 'no PyTorch (pip install -r requirements-bench.txt)'


def attention(log, score: str, causal: bool, query, key, value, params) -> dict[str, dict[str, Side]]:
  """{'torch': {'forward': Side, 'backward': Side}, ...} of one score of WAYS."""
  if torch is None:
    return {}
  given = [torch.tensor(x) for x in (query, key, value)]
  ways = WAYS[score](log, given, {name: torch.tensor(np.asarray(p)) for name, p in params.items()}, causal)
  return {name: {'forward': _forward(way, given), 'backward': _backward(way, given)} for name, way in ways.items()}


def _additive(log, given, params, causal) -> dict[str, Callable]:
  def formula(query, key, value):
    scores = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ params['v']
    return torch.softmax(scores, -1) @ value

  compiled = torch.compile(formula)
  try:
    compiled(*given)
  except Exception as error:  # it needs a C++ compiler, and fails in ways of its own
    log(f'torch.compile does not work here and is left out: {type(error).__name__}')
    return {'torch': formula}
  return {'torch': formula, 'torch.compile': compiled}


def _scaled_dot(log, given, params, causal) -> dict[str, Callable]:
  return {'torch sdpa': functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)}


def _one_by_one(feature: Callable, params, seen: Callable) -> dict[str, Callable]:
  """Additive scores with a feature of the weights so far beside the keys, a query at a time; seen(so far, weights)."""

  def formula(query, key, value):
    so_far, contexts = torch.zeros_like(key[..., 0]), []
    for one in query.unbind(-2):
      scores = torch.tanh(one.unsqueeze(-2) + key + feature(so_far)) @ params['v']
      weights = torch.softmax(scores, -1)
      so_far = seen(so_far, weights)
      contexts.append((weights.unsqueeze(-2) @ value).squeeze(-2))
    return torch.stack(contexts, -2)

  return {'torch': formula}


def _coverage(log, given, params, causal) -> dict[str, Callable]:
  return _one_by_one(lambda so_far: so_far.unsqueeze(-1) * params['u'], params, torch.add)


def _location_sensitive(log, given, params, causal) -> dict[str, Callable]:
  filters = params['filters'].flip(-1).unsqueeze(1)  # a true convolution; theirs does not flip

  def feature(weights):
    rows = weights.reshape(-1, 1, weights.shape[-1])
    found = torch.nn.functional.conv1d(rows, filters, padding=filters.shape[-1] // 2)
    return (found.mT @ params['u']).reshape(*weights.shape, -1)

  return _one_by_one(feature, params, lambda _, weights: weights)


WAYS = {
  'additive': _additive,
  'coverage': _coverage,
  'location_sensitive': _location_sensitive,
  'scaled_dot': _scaled_dot,
}


def _forward(fn: Callable, given) -> Side:
  def run():
    with torch.no_grad():
      return fn(*given)

  return Side(run)


def _backward(fn: Callable, given) -> Side:
  leaves = [x.clone().requires_grad_() for x in given]
  return Side(lambda: torch.autograd.grad(torch.sin(fn(*leaves)).sum(), leaves))


def build_model(name: str, sizes):
  """A model of torch_model.py or torch_transformer.py."""
  from experiments.benchmarks import torch_model, torch_transformer

  torch.manual_seed(0)
  return (getattr(torch_model, name, None) or getattr(torch_transformer, name))(**sizes)


def difference(params, logits, batch, sizes) -> float | None:
  """The greatest difference between these logits and those of PyTorch's Transformer with the same parameters.

  PyTorch's are in float64: what rounding its own would add says nothing of ours.
  """
  if torch is None:
    return None
  model = build_model('Transformer', sizes).eval()
  model.load_jax_params(params)
  model.double()
  with torch.no_grad():
    found = model.logits(*(torch.tensor(np.asarray(x), dtype=torch.long) for x in batch))
  return float(np.abs(found.numpy() - np.asarray(logits)).max())


def translate(params, sizes, beams: int, longest: int, dtype: str):
  """padded sources [B, S] -> the target ids of each, without EOS, by Bahdanau with these parameters of ours.

  Args: dtype, what it computes in.
  """
  model = build_model('Bahdanau', sizes).eval()
  model.load_jax_params(params)

  def run(source):
    with torch.inference_mode(), _computing_in(dtype):
      return model.translate(torch.tensor(source, dtype=torch.long), beams, longest)

  return run


COMPILED = {'Bahdanau': 'recur', 'Luong': 'loss', 'Transformer': 'loss'}  # the method that torch.compile is given


def _computing_in(dtype: str):
  """Parameters stay in float32; in bfloat16, products are what torch.autocast makes of them."""
  return torch.autocast('cpu', torch.bfloat16, enabled=dtype == 'bfloat16')


def train_step(name: str, batch, sizes, dtype: str) -> Side | None:
  """One update of a model on (source, target) ids with 0 for padding."""
  return None if torch is None else Side(_update(build_model(name, sizes), batch, dtype))


def compiled_train_step(log, name: str, batch, sizes, dtype: str) -> Side | None:
  """The same by torch.compile; None where that does not work."""
  if torch is None:
    return None
  model = build_model(name, sizes)
  setattr(model, COMPILED[name], torch.compile(getattr(model, COMPILED[name])))
  update = _update(model, batch, dtype)
  try:
    update()
  except Exception as error:  # it needs a C++ compiler, and fails in ways of its own
    log(f'torch.compile does not work here and is left out: {type(error).__name__}')
    return None
  return Side(update)


def _update(model, batch, dtype: str) -> Callable[[], None]:
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


def decode(source, sizes, beams: int, steps: int, dtype: str) -> Side | None:
  """A beam search of so many steps; with one beam, greedy search."""
  if torch is None:
    return None
  model = build_model('Bahdanau', sizes).eval()
  source = torch.tensor(np.asarray(source), dtype=torch.long)
  with torch.no_grad():
    model.output.bias[EOS] = -1e9  # no hypothesis ends, so that all steps are made

  def run():
    with torch.inference_mode(), _computing_in(dtype):
      return model.translate(source, beams, steps)

  return Side(run)
