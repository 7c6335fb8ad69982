"""Exported attention of any number of queries and positions, also in processes without this package."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import attention_jax as aj
from tests.functional.alignment_cases import ALIGNMENT_CASES
from tests.functional.cases import SCORE_CASES
from tests.functional.helpers import assert_same

B, T, S, D, V = 3, 11, 7, 5, 2
PAIRS = [(case.name, 'softmax') for case in SCORE_CASES] + [('dot', case.name) for case in ALIGNMENT_CASES]
SAMPLE = [('location_sensitive', 'monotonic'), ('dot', 'addressing'), ('dot', 'stick_breaking')]
# Runs an exported function as other people would: with jax and numpy alone.
RUN_ELSEWHERE = """
import sys
sys.modules['attention_jax'] = None  # importing it raises ImportError
import jax, numpy as np
arrays = np.load(sys.argv[2])
exported = jax.export.deserialize(bytearray(open(sys.argv[1], 'rb').read()))
context, weights = exported.call(*(arrays[name] for name in ('query', 'key', 'value', 'mask')))
np.testing.assert_allclose(context, arrays['context'], rtol=1e-5, atol=1e-6)
np.testing.assert_allclose(weights, arrays['weights'], rtol=1e-5, atol=1e-6)
print(weights.shape)
"""


def attention(score: str, alignment: str | aj.Row, implementation: str = 'auto', deterministic: bool = True):
  """Returns a function attend(query, key, value, mask, rng) with random parameters."""
  params = aj.init_params(jax.random.key(1), score=score, alignment=alignment, query=D, key=D, value=V, features=D)

  def attend(query, key, value, mask, rng=None):
    options = {'score': score, 'alignment': alignment, 'params': params, 'implementation': implementation}
    return tuple(aj.attend(query, key, value, mask, rng=rng, deterministic=deterministic, **options))

  return attend


def arrays(batch: int = B, steps: int = T, size: int = S):
  query, key, value = (
    jax.random.normal(jax.random.key(i), (batch, rows, width))
    for i, (rows, width) in enumerate([(steps, D), (size, D), (size, V)])
  )
  mask = aj.padding_mask(jnp.arange(batch) % size + 1, size)[:, None]
  return query, key, value, mask


def symbolic_arrays(constraints=('s <= 20',)):
  b, t, s = export.symbolic_shape('b, t, s', constraints=constraints)
  shapes = [(b, t, D), (b, s, D), (b, s, V)]
  return *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), jax.ShapeDtypeStruct((b, 1, s), jnp.bool_)


@pytest.mark.long
@pytest.mark.parametrize(
  ('score', 'alignment'),
  [pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.product) for pair in dict.fromkeys(PAIRS + SAMPLE)],
)
def test_every_score_and_every_alignment_is_exported_for_any_size(score, alignment):
  """Implementation 'auto' selects 'xla' for symbolic sizes."""
  attend = attention(score, alignment)
  rng = jax.random.key(0)
  exported = export.export(jax.jit(attend))(*symbolic_arrays(), rng)
  inputs = arrays()
  assert_same(exported.call(*inputs, rng), jax.jit(attend)(*inputs, rng), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_dropout_is_exported_for_any_size():
  attend = attention('dot', aj.with_dropout('softmax', 0.5), deterministic=False)
  exported = export.export(jax.jit(attend))(*symbolic_arrays(), jax.eval_shape(lambda: jax.random.key(0)))
  for size in (1, S):
    inputs = (*arrays(size=size), jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, exported.call(*inputs), attend(*inputs))


@pytest.mark.long
@pytest.mark.parametrize('implementation', ['chunked', 'factored'])
def test_blocks_of_queries_are_exported_for_any_size(implementation):
  exported = export.export(jax.jit(attention('additive', 'softmax', implementation)))(*symbolic_arrays())
  inputs = arrays(steps=301)  # three blocks of 101 queries, the last of which is not full
  assert_same(exported.call(*inputs), attention('additive', 'softmax', 'xla')(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('implementation', 'alignment'), [('flash', 'softmax'), ('window', 'local_m')])
def test_flash_and_window_reject_symbolic_sizes(implementation, alignment):
  # The list does not have 'factored', which computes additive scores alone.
  message = (
    f"implementation '{implementation}' needs fixed numbers .*, got T=t and S=s; expected one of: xla, chunked, auto"
  )
  with pytest.raises(aj.UserError, match=message):
    export.export(jax.jit(attention('dot', alignment, implementation)))(*symbolic_arrays())


@pytest.mark.long
def test_scores_by_position_need_a_bound():
  attend = attention('location(max_positions=50)', 'softmax')
  export.export(jax.jit(attend))(*symbolic_arrays())
  with pytest.raises(aj.UserError, match="rows; set the constraint 's <= 50'"):
    export.export(jax.jit(attend))(*symbolic_arrays(constraints=()))


@pytest.mark.long
def test_an_exported_function_runs_without_this_package(tmp_path):
  pytest.importorskip('flatbuffers')  # of the extra `interop`
  attend = attention('additive', 'entmax15')
  exported = export.export(jax.jit(attend))(*symbolic_arrays())
  (tmp_path / 'attend.bin').write_bytes(exported.serialize())
  inputs = arrays()
  context, weights = attend(*inputs)
  named = dict(zip(('query', 'key', 'value', 'mask'), inputs, strict=True))
  np.savez(tmp_path / 'arrays.npz', **named, context=context, weights=weights)
  command = [sys.executable, '-c', RUN_ELSEWHERE, tmp_path / 'attend.bin', tmp_path / 'arrays.npz']
  result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert result.returncode == 0, result.stderr
  assert result.stdout.split('\n')[0] == str((B, T, S))
