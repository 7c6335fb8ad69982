"""`Mask`: which positions each query may attend to, as structure that kernels can use, instead of an array [T, S].

  mask = Mask.causal() & Mask.lengths(lengths[:, None])  # of queries [B, N, T, D]
  mask.dense(T, S)  # bool [B, 1, T, S]

Widths of bands are static. Lengths, segments, offsets and arrays are the leaves of a pytree; their leading axes
broadcast to those of the queries. Two masks are combined by `&`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from attention_jax.annotations import Array, Bool, Int
from attention_jax.errors import UserError
from attention_jax.functional.masking import Dimension, check_size, integer_array, mask_array


class Band(NamedTuple):
  """Query t may attend to position s if t - left <= s <= t + right, or s < sinks.

  Attributes:
    left: number of positions before the query; None is no limit.
    right: number of positions after the query; None is no limit.
    sinks: number of first positions that every query may attend to (Xiao et al. 2024).
  """

  left: int | None = None
  right: int | None = None
  sinks: int = 0

  def dense(self, queries: Any, positions: Any) -> Any:
    """Returns the mask of queries and memory positions, arrays of jax or NumPy that broadcast to each other."""
    mask = queries == queries
    if self.left is not None:
      mask = mask & (positions >= queries - self.left)
    if self.right is not None:
      mask = mask & (positions <= queries + self.right)
    return mask | (positions < self.sinks) if self.sinks else mask

  def classify(self, queries: tuple[Any, Any], positions: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns whether blocks have any, and have only, pairs that may attend.

    Args:
      queries, positions: the first and the last of each block, arrays of jax or NumPy that broadcast to each other.
    """
    (first_query, last_query), (first, last) = queries, positions
    live = full = (first_query == first_query) & (first == first)
    if self.left is not None:
      live = live & (last >= first_query - self.left)
      full = full & (first >= last_query - self.left)
    if self.right is not None:
      live = live & (first <= last_query + self.right)
      full = full & (last <= first_query + self.right)
    return live | (first < self.sinks), full | (last < self.sinks)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('offset', 'length', 'query_segments', 'key_segments', 'remainder'),
  meta_fields=('bands',),
)
@dataclasses.dataclass(frozen=True)
class Mask:
  """Which positions each query may attend to. A position must satisfy every part that is not None.

  Attributes:
    bands: bands around the position of the query.
    offset: the position of the first query, [...]; None is 0.
    length: number of first positions that may be attended to, [...].
    query_segments, key_segments: ids [..., T] and [..., S], which must be equal.
    remainder: True = may be attended to, [..., T or 1, S].
  """

  bands: tuple[Band, ...] = ()
  offset: Any = None  # not annotated as arrays: jax makes masks of other leaves, such as axes
  length: Any = None
  query_segments: Any = None
  key_segments: Any = None
  remainder: Any = None

  @classmethod
  def causal(cls) -> 'Mask':
    """Positions that are not after the query."""
    return cls(bands=(Band(right=0),))

  @classmethod
  def window(cls, left: int | None, right: int | None, sinks: int = 0) -> 'Mask':
    """Positions t - left <= s <= t + right of query t, and the first `sinks` positions.

    Raises:
      UserError: for a width that is neither None, which is no limit, nor a whole number of at least 0.
    """
    for name, width in {'left': left, 'right': right, 'sinks': sinks}.items():
      if width is not None:
        check_size('Mask.window', name, width)
    return cls(bands=(Band(left, right, sinks),))

  @classmethod
  def lengths(cls, lengths: ArrayLike) -> 'Mask':
    """The first `lengths` [...] positions. Raises UserError for lengths that are not whole numbers."""
    return cls(length=integer_array('Mask.lengths', 'lengths', lengths))

  @classmethod
  def segments(cls, ids: ArrayLike, key_ids: ArrayLike | None = None) -> 'Mask':
    """Positions with the id of the query; `key_ids` are those of the memory, by default `ids`, for self-attention.

    Raises:
      UserError: for ids that are not whole numbers, or a single number.
    """
    arrays = [integer_array('Mask.segments', 'ids', x) for x in (ids, ids if key_ids is None else key_ids)]
    if not all(x.ndim for x in arrays):
      raise UserError('Mask.segments: ids must be [..., T], got one number')
    return cls(query_segments=arrays[0], key_segments=arrays[1])

  @classmethod
  def array(cls, array: ArrayLike) -> 'Mask':
    """A bool array [..., T, S], [..., 1, S] or [S], True = may be attended to. Raises UserError if it is not bool."""
    return cls(remainder=jnp.atleast_2d(mask_array('Mask.array', array)))

  def at(self, offset: ArrayLike) -> 'Mask':
    """The mask of queries whose first one has position `offset` [...], as in decoding with cached keys."""
    offset = integer_array('Mask.at', 'offset', offset)
    return dataclasses.replace(self, offset=_plus(self.offset, offset))

  def __and__(self, other: 'Mask | Array') -> 'Mask':
    """The positions of both masks; a bool array is read as by `Mask.array`.

    Raises:
      UserError: if both have bands and one has an offset: `at` is applied to the combined mask.
    """
    other = as_mask('Mask', other)
    if self.bands and other.bands and (self.offset is not None or other.offset is not None):
      raise UserError('Mask: combine masks first, then give their queries an offset, as in (a & b).at(offset)')
    remainder, query_segments, key_segments = self.remainder, self.query_segments, self.key_segments
    if query_segments is None:
      query_segments, key_segments = other.query_segments, other.key_segments
    elif other.query_segments is not None:  # two sets of segments: one of them as an array
      remainder = _logical_and(remainder, _same_segment(other.query_segments, other.key_segments))
    return Mask(
      _both_bands(self.bands, other.bands),
      self.offset if other.offset is None else other.offset,
      _minimum(self.length, other.length),
      query_segments,
      key_segments,
      _logical_and(remainder, other.remainder),
    )

  __rand__ = __and__

  @property
  def is_shared(self) -> bool:
    """Whether all queries of a sequence have the same mask."""
    return not self.bands and self.query_segments is None and (self.remainder is None or self.remainder.shape[-2] == 1)

  def dense(self, num_queries: Dimension, size: Dimension) -> Bool[Array, '... T S']:
    """Returns the mask as an array. Computed within the program that uses it, it is usually not stored.

    Args:
      num_queries: T.
      size: S.
    """
    mask = self._of(jnp.arange(num_queries), jnp.arange(size), self.query_segments, self.key_segments)
    return mask if self.remainder is None else _logical_and(mask, self.remainder)

  def block(self, first_query: Any, num_queries: int, first_position: Any, size: int) -> Bool[Array, 'T S']:
    """Returns `num_queries` queries and `size` positions of the mask of one sequence, without `remainder`."""
    ids = key_ids = None
    if self.query_segments is not None:
      ids = jax.lax.dynamic_slice_in_dim(self.query_segments, first_query, num_queries)
      key_ids = jax.lax.dynamic_slice_in_dim(self.key_segments, first_position, size)
    return self._of(first_query + jnp.arange(num_queries), first_position + jnp.arange(size), ids, key_ids)

  def _of(self, queries: Array, positions: Array, ids: Array | None, key_ids: Array | None) -> Array:
    """The mask of queries [T] and positions [S] with their segments, without `remainder`."""
    positions = positions[None]
    rows = queries[:, None] if self.offset is None else _plus(jnp.expand_dims(self.offset, (-2, -1)), queries[:, None])
    parts = [band.dense(rows, _like(rows, positions)) for band in self.bands]
    if self.length is not None:
      length = jnp.expand_dims(self.length, (-2, -1))
      parts.append(_like(length, positions) < length)
    if ids is not None:
      parts.append(_same_segment(ids, key_ids))
    return functools.reduce(_logical_and, parts, jnp.ones((queries.shape[0], positions.shape[1]), bool))

  def is_everywhere(self, num_queries: Dimension, size: Dimension) -> bool:
    """Returns whether it is known, from the structure alone, that every position has a query that may attend to it."""
    if jax.tree.leaves(self) or len(self.bands) > 1:
      return False
    return all(band.right is None or size <= num_queries + band.right for band in self.bands)

  def any_query(self, num_queries: Dimension | None, size: Dimension) -> Bool[Array, '... S']:
    """Returns which positions any query may attend to.

    Args:
      num_queries: T; None if it is not known: positions that only bands exclude are then True.
      size: S.
    """
    shared = dataclasses.replace(self, bands=(), query_segments=None, key_segments=None)
    if num_queries is None:
      keys = shared.remainder if shared.remainder is None else shared.remainder.any(-2, keepdims=True)
      return dataclasses.replace(shared, remainder=keys).dense(1, size)[..., 0, :]
    if shared.is_shared and self.query_segments is None and len(self.bands) < 2:  # no pass over [T, S]
      (left, right, sinks) = self.bands[0] if self.bands else Band()
      first = jnp.zeros((1,), jnp.int32) if self.offset is None else self.offset[..., None]
      # The bands of the first and the last query, and of those between them, have no gap.
      left = None if left is None else left + num_queries - 1
      band = Band(left, right, sinks).dense(first + (num_queries - 1), _like(first, jnp.arange(size)))
      return _logical_and(shared.dense(1, size)[..., 0, :], band)
    return self.dense(num_queries, size).any(-2)

  def any_key(self, num_queries: Dimension, size: Dimension) -> Bool[Array, '...']:
    """Returns which queries may attend to any position, [..., T], or [..., 1] if all or none of a sequence may."""
    if self.is_shared or len(self.bands) > 1 or self.query_segments is not None or self.remainder is not None:
      return self.dense(1 if self.is_shared else num_queries, size).any(-1)
    (left, _, sinks) = self.bands[0]  # no pass over [T, S]
    queries = jnp.arange(num_queries)
    queries = queries if self.offset is None else _plus(self.offset[..., None], queries)
    length = jnp.asarray(size) if self.length is None else self.length[..., None]
    length = _like(queries, length)
    has_first = length > 0 if left is None else _like(length, queries) - left < length
    return (has_first | (sinks > 0)) & (length > 0)

  def by_block(self, count: Dimension, block: Dimension) -> dict[str, Array]:
    """Returns the fields that differ between blocks of `block` queries, with a leading axis of `count` blocks.

    `dataclasses.replace(mask, **fields)` of one block is its mask. For the mask of one sequence, without leading axes.
    The last block may be longer than what is left: it repeats the last query.
    """
    fields: dict[str, Array] = {}
    if self.bands:
      fields['offset'] = (0 if self.offset is None else self.offset) + jnp.arange(count) * block
    if self.query_segments is not None:
      fields['query_segments'] = split_blocks(self.query_segments, count, block)
    if self.remainder is not None and self.remainder.shape[-2] != 1:
      fields['remainder'] = split_blocks(self.remainder, count, block)
    return fields

  def query_positions(self, num_queries: Dimension) -> Int[Array, ' T']:
    """Returns the positions of the queries of one sequence: 0 ... T - 1, plus the offset."""
    positions = jnp.arange(num_queries, dtype=jnp.int32)
    return positions if self.offset is None else self.offset + positions

  def by_query(self, num_queries: Dimension) -> dict[str, Array]:
    """Returns the fields that differ between queries, with a leading axis T; see `row`."""
    return self.by_block(num_queries, 1)

  def row(self, fields: Mapping[str, Array], size: Dimension) -> Bool[Array, ' S']:
    """Returns the mask of one query as an array; `fields` are those of `by_query` for it."""
    return dataclasses.replace(self, **fields).dense(1, size)[0]


# The leaves of a Mask, and the number of their axes after the leading ones.
CORE_AXES = {'offset': 0, 'length': 0, 'query_segments': 1, 'key_segments': 1, 'remainder': 2}


def positions_of(mask: Mask | Array, size: Dimension) -> Array:
  """Returns a mask of positions that all queries share as an array [B, S]: a Mask, or such an array."""
  return mask.any_query(None, size) if isinstance(mask, Mask) else mask


def as_mask(caller: str, mask: Any) -> Mask:
  """Returns a mask as a Mask: one already, a bool array, or None for all positions.

  Raises:
    UserError: for an array that is not bool.
  """
  if mask is None:
    return Mask()
  return mask if isinstance(mask, Mask) else Mask(remainder=jnp.atleast_2d(mask_array(caller, mask)))


def split_blocks(x: Array, count: Dimension, block: Dimension) -> Array:
  """Splits x [T, ...] into [count, block, ...]; the last row is repeated to fill the last block."""
  missing = count * block - x.shape[0]
  padded = jnp.concatenate([x, jnp.broadcast_to(x[-1:], (missing, *x.shape[1:]))])
  return padded.reshape(count, block, *x.shape[1:])


def _both_bands(first: tuple[Band, ...], second: tuple[Band, ...]) -> tuple[Band, ...]:
  """The bands of two masks: those without sinks are one band of the smaller widths."""
  bands = dict.fromkeys(first + second)
  plain = [band for band in bands if not band.sinks]
  if not plain:
    return tuple(bands)
  left, right = ([x for x in widths if x is not None] for widths in ([b.left for b in plain], [b.right for b in plain]))
  smallest = Band(min(left, default=None), min(right, default=None))
  return smallest, *(band for band in bands if band.sinks)


def _same_segment(query_ids: Array, key_ids: Array) -> Array:
  query_ids, key_ids = query_ids[..., :, None], key_ids[..., None, :]
  return _like(key_ids, query_ids) == _like(query_ids, key_ids)


def _like(x: Array, y: Array) -> Array:
  """Returns y with as many leading axes as x, if it has fewer."""
  return y.reshape(*(1 for _ in range(x.ndim - y.ndim)), *y.shape)


def _combined(combine: Callable, x: Array | None, y: Array | None) -> Array | None:
  """Combines leaves whose last axes correspond; None has no effect."""
  if x is None or y is None:
    return y if x is None else x
  return combine(_like(y, x), _like(x, y))


_logical_and = functools.partial(_combined, jnp.logical_and)
_minimum = functools.partial(_combined, jnp.minimum)
_plus = functools.partial(_combined, jnp.add)


def align_mask(caller: str, mask: Any, batch: tuple[Dimension, ...], num_queries: Dimension | None, size: Dimension):
  """Returns a mask as a Mask whose leaves have all batch axes, of length 1 where the mask is shared.

  Args:
    caller: name of the caller, with which error messages begin.
    mask: a Mask, a bool array that broadcasts to [..., T, S], or None.
    batch: the sizes of the batch axes.
    num_queries: T; None if it is not known.
    size: S.

  Raises:
    UserError: for a mask that does not broadcast, and an array that is not bool.
  """
  mask = as_mask(caller, mask)

  def align(field: str) -> Array | None:
    x = getattr(mask, field)
    core = (size,) if field == 'key_segments' else (num_queries, size)[: CORE_AXES[field]]
    if x is None:
      return None
    expected = (*batch, *core)
    shape = (1,) * (len(expected) - x.ndim) + x.shape
    is_segments = field.endswith('segments')  # one id for each position
    fits = len(shape) == len(expected) and all(
      n == wanted or wanted is None or (n == 1 and not (is_segments and axis == len(batch)))
      for axis, (n, wanted) in enumerate(zip(shape, expected, strict=False))
    )
    if not fits:
      raise UserError(_alignment_error(caller, field, x.shape, batch, core))
    x = x.reshape(shape)
    return jnp.broadcast_to(x, (*shape[:-1], size)) if field == 'remainder' else x

  return dataclasses.replace(mask, **{field: align(field) for field in CORE_AXES})


def _alignment_error(caller: str, field: str, shape: tuple, batch: tuple, core: tuple) -> str:
  if field != 'remainder':
    name = field.replace('_', ' ')
    return f'{caller}: the {name} {shape} of the mask must broadcast to {(*batch, *core)}, the batch axes {batch} first'
  hint = ''
  if batch:
    new_axes = ', '.join(['None'] * len(batch))  # for T and all batch axes but the first
    hint = f'; pass a padding mask [B, S] as mask[:, {new_axes}]'
  expected = tuple('T' if n is None else n for n in (*batch, *core))
  return f'{caller}: mask {shape} does not broadcast to [..., T, S] = {expected}{hint}'
