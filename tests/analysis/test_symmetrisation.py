"""Symmetrisation against the loops of the published pseudo code over matrices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_jax.analysis.symmetrisation import SYMMETRISATIONS, symmetrise
from attention_jax.errors import UserError

SIZE = 6
LINKS = st.sets(st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1)), max_size=14)
STEPS = [(-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1)]
METHODS = {  # method -> (steps, how final joins the two conditions)
  'grow': (STEPS[:4], None),
  'grow_diag': (STEPS, None),
  'grow_diag_final': (STEPS, np.logical_or),
  'grow_diag_final_and': (STEPS, np.logical_and),
}


def literal(forward, reverse, method):
  """GROW-DIAG, FINAL(e2f) and FINAL(f2e) of the Moses manual, with e the target and f the source."""
  steps, condition = METHODS[method]
  e2f, f2e = (np.zeros((SIZE, SIZE), bool) for _ in range(2))
  for matrix, links in ((e2f, forward), (f2e, reverse)):
    for f, e in links:
      matrix[e, f] = True
  alignment = e2f & f2e
  union = e2f | f2e
  while True:
    before = alignment.sum()
    for e in range(SIZE):
      for f in range(SIZE):
        if alignment[e, f]:
          for e_step, f_step in steps:
            e_new, f_new = e + e_step, f + f_step
            if not (0 <= e_new < SIZE and 0 <= f_new < SIZE):
              continue
            is_free = not alignment[e_new].any() or not alignment[:, f_new].any()
            if is_free and union[e_new, f_new]:
              alignment[e_new, f_new] = True
    if alignment.sum() == before:
      break
  for direction in (e2f, f2e) if condition else ():
    for e_new in range(SIZE):
      for f_new in range(SIZE):
        is_free = condition(not alignment[e_new].any(), not alignment[:, f_new].any())
        if is_free and direction[e_new, f_new]:
          alignment[e_new, f_new] = True
  return sorted((int(f), int(e)) for e, f in np.argwhere(alignment))


@pytest.mark.long
@pytest.mark.parametrize('method', METHODS)
@given(forward=LINKS, reverse=LINKS)
def test_growing_equals_the_pseudo_code(method, forward, reverse):
  assert symmetrise(forward, reverse, method) == literal(forward, reverse, method)


@given(forward=LINKS, reverse=LINKS)
def test_every_method_lies_between_intersection_and_union(forward, reverse):
  for method in SYMMETRISATIONS:
    links = set(symmetrise(forward, reverse, method))
    assert forward & reverse <= links <= forward | reverse


def test_links_of_an_example_are_those_by_hand():
  forward = [(0, 0), (1, 1), (2, 2), (4, 4)]
  reverse = [(0, 0), (1, 1), (1, 2), (3, 3), (0, 4)]
  assert symmetrise(forward, reverse, 'grow_diag') == [(0, 0), (1, 1), (1, 2), (2, 2), (3, 3), (4, 4)]
  assert symmetrise(forward, reverse, 'intersection') == [(0, 0), (1, 1)]
  assert symmetrise(forward, reverse, 'forward') == sorted(forward)


def test_an_unknown_method_raises():
  with pytest.raises(UserError, match=r"symmetrisation.*'grow_diag_final'"):
    symmetrise([], [], 'grow_diag_finale')
