"""Score functions: how well one query matches each memory position. query [Dq], key [S, Dk] -> scores [S].

Every formula is written for ONE query; `attend` lifts it over queries, heads and batch. Scores, and sums and products
inside of them, are at least float32: float16 ends at 65504, which a product of moderate numbers may exceed.
Keyword-only arguments without a default are learned parameters (shapes in SCORES), or `previous` and `coverage`, which
the attention step supplies.
"""

import jax
import jax.numpy as jnp

from attention_jax.annotations import Array, Float
from attention_jax.errors import UserError
from attention_jax.functional.dense import check_at_least, check_number
from attention_jax.functional.masking import accumulation_dtype, at_least_float32, vary_alike
from attention_jax.functional.table import Param, Product, ReverseMode, Row, TanhSum, check_table

Scores = Float[Array, ' S']


def _einsum(spec: str, *operands: Array) -> Array:
  """Einsum that accumulates in at least float32."""
  return jnp.einsum(spec, *operands, preferred_element_type=accumulation_dtype(*operands))


def _check_widths(query: Array, key: Array) -> None:
  """Raises UserError unless query and key have the same width; a width of 1 would be broadcast."""
  if query.shape[-1] != key.shape[-1]:
    shapes = f'query {query.shape} and key {key.shape} (of one sequence, after any projection)'
    raise UserError(f'{shapes} must be of the same width')


def dot(query: Float[Array, ' D'], key: Float[Array, 'S D']) -> Scores:
  """eₛ = q · kₛ. Luong, Pham & Manning 2015, section 3.1."""
  _check_widths(query, key)
  return _einsum('d,sd->s', query, key)


def scaled_dot(
  query: Float[Array, ' D'], key: Float[Array, 'S D'], *, scale: float | Float[Array, ''] | None = None
) -> Scores:
  """eₛ = a q · kₛ, a = 1 / √D unless `scale` sets it. Vaswani et al. 2017, equation 1."""
  return dot(query, key) * _scale('scaled_dot', scale, query.shape[-1])


def _scale(name: str, scale: float | Array | None, width: int) -> float | Array:
  """The factor of scores of vectors of `width` features: 1 / √width for None."""
  if scale is None:
    return width**-0.5
  check_number(name, 'scale', scale)
  return at_least_float32(scale)


def general(query: Float[Array, ' Dq'], key: Float[Array, 'S Dk'], *, w: Float[Array, 'Dq Dk']) -> Scores:
  """eₛ = qᵀ W kₛ. Luong et al. 2015, section 3.1."""
  return dot(*_general_product(query, key, w=w))


def low_rank(
  query: Float[Array, ' Dq'], key: Float[Array, 'S Dk'], *, u: Float[Array, 'Dq R'], v: Float[Array, 'Dk R']
) -> Scores:
  """eₛ = (Uᵀ q) · (Vᵀ kₛ): `general` with W = U Vᵀ of rank R. Britz et al. 2017 (their 'mul' with projections)."""
  return dot(*_low_rank_product(query, key, u=u, v=v))


def additive(query: Float[Array, ' F'], key: Float[Array, 'S F'], *, v: Float[Array, ' F']) -> Scores:
  """eₛ = vᵀ tanh(q + kₛ), q and k already projected. Bahdanau, Cho & Bengio 2015, appendix A.1.2."""
  _check_widths(query, key)
  return _tanh_sum(query, key, v)


def _tanh_sum(query: Float[Array, ' F'], key: Float[Array, 'S F'], v: Float[Array, ' F']) -> Scores:
  """vᵀ tanh(q + kₛ) in at least float32: on CPUs, rounding intermediate results takes longer than computing them."""
  query = at_least_float32(query)
  key = at_least_float32(key)
  v = at_least_float32(v)
  return _einsum('sf,f->s', jnp.tanh(query[None, :] + key), v)


def normed_additive(
  query: Float[Array, ' F'],
  key: Float[Array, 'S F'],
  *,
  v: Float[Array, ' F'],
  gain: float | Float[Array, ''],
  bias: Float[Array, ' F'],
) -> Scores:
  """eₛ = g v/‖v‖ · tanh(q + kₛ + b). Weight normalisation (Salimans & Kingma 2016) of the additive score."""
  _check_widths(query, key)
  scores = _tanh_sum(at_least_float32(query) + at_least_float32(bias), key, _unit(v))
  return jnp.asarray(gain, scores.dtype) * scores


def offset_additive(
  query: Float[Array, ' F'],
  key: Float[Array, 'S F'],
  *,
  v: Float[Array, ' F'],
  gain: float | Float[Array, ''],
  bias: Float[Array, ' F'],
  offset: float | Float[Array, ''],
) -> Scores:
  """eₛ = g v/‖v‖ · tanh(q + kₛ + b) + r, with r < 0 initially for monotonic attention. Raffel et al. 2017."""
  scores = normed_additive(query, key, v=v, gain=gain, bias=bias)
  return scores + jnp.asarray(offset, scores.dtype)


def concat(
  query: Float[Array, ' Dq'], key: Float[Array, 'S Dk'], *, w: Float[Array, 'Dq+Dk F'], v: Float[Array, ' F']
) -> Scores:
  """eₛ = vᵀ tanh(Wᵀ [q; kₛ]), on unprojected input. Luong et al. 2015, section 3.1."""
  from_query = _einsum('d,df->f', query, w[: query.shape[-1]])
  from_key = _einsum('sd,df->sf', key, w[query.shape[-1] :])
  return _tanh_sum(from_query, from_key, v)


def cosine(query: Float[Array, ' D'], key: Float[Array, 'S D'], *, beta: float | Float[Array, '']) -> Scores:
  """eₛ = β q·kₛ / (‖q‖ ‖kₛ‖), and 0 for a zero vector. Graves, Wayne & Danihelka 2014, equations 5 and 6.

  In Transformers, with a learned β, it is the query-key normalisation of Henry et al. 2020.
  """
  scores = dot(_unit(query), _unit(key))
  return jnp.asarray(beta, scores.dtype) * scores


def normed_dot(
  query: Float[Array, ' D'],
  key: Float[Array, 'S D'],
  *,
  query_gain: Float[Array, ' D'],
  key_gain: Float[Array, ' D'],
  epsilon: float = 0.0,
  scale: float | Float[Array, ''] | None = None,
) -> Scores:
  """eₛ = a (g ∘ q/rms q) · (h ∘ kₛ/rms kₛ), and 0 for a zero vector. Dehghani et al. 2023, with the rms as norm.

  rms x = √(mean x² + ε): models with an RMSNorm of queries and keys have an `epsilon` such as 1e-6, which matters for
  small vectors. a = 1 / √D unless `scale` sets it. The module Attention rotates g ∘ q/rms q and h ∘ kₛ/rms kₛ if its
  positions are rotary, as Qwen3 and Gemma 3 do.

  Raises:
    UserError: if epsilon is a negative number.
  """
  gains = {'query_gain': query_gain, 'key_gain': key_gain}
  return dot(*_normed_product(query, key, **gains, epsilon=epsilon, scale=scale))


def elu_dot(query: Float[Array, ' D'], key: Float[Array, 'S D']) -> Scores:
  """eₛ = φ(q) · φ(kₛ), φ(x) = elu(x) + 1 > 0, for linear attention. Katharopoulos et al. 2020, equation 7.

  With the alignment `proportional`, implementation 'linear' computes it in linear time.
  """
  return dot(*_elu_product(query, key))


def _unit(x: Float[Array, '... D'], offset: float | Float[Array, ''] = 0.0) -> Float[Array, '... D']:
  """x / √(‖x‖² + offset), and 0 for a zero vector."""
  x = at_least_float32(x)
  root = jnp.sqrt(jnp.asarray(offset, x.dtype))
  largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), root))
  # The squares of numbers outside of this range could overflow or vanish.
  is_moderate = (largest > 2.0**-50) & (largest < 2.0**50)
  scale = jnp.where(is_moderate | (largest == 0), 1.0, largest)
  x = x / scale
  square = jnp.sum(x**2, axis=-1, keepdims=True) + (root / scale) ** 2
  # Double where: the derivative of rsqrt is infinite at 0, which would make the zero gradient NaN.
  is_positive = square > 0
  return jnp.where(is_positive, x * jax.lax.rsqrt(jnp.where(is_positive, square, 1.0)), 0.0)


def location(query: Float[Array, ' Dq'], key: Float[Array, 'S Dk'], *, w: Float[Array, 'M Dq']) -> Scores:
  """e = (W q)[:S]: from the query alone. Luong et al. 2015, section 3.1.

  Raises:
    UserError: if the memory has more positions than w has rows, or may have more because their number is symbolic.
  """
  size = key.shape[0]
  rows = w.shape[0]
  if jax.core.max_dim(size, rows) != rows:
    remedy = f"'location(max_positions={size})'" if isinstance(size, int) else f"the constraint '{size} <= {rows}'"
    raise UserError(f'location: the memory has S={size} positions but w only max_positions={rows} rows; set {remedy}')
  return _einsum('sd,d->s', w[:size], query)


def location_sensitive(
  query: Float[Array, ' F'],
  key: Float[Array, 'S F'],
  *,
  previous: Float[Array, ' S'],
  filters: Float[Array, 'C W'],
  u: Float[Array, 'C F'],
  v: Float[Array, ' F'],
) -> Scores:
  """eₛ = vᵀ tanh(q + kₛ + Uᵀ fₛ), f = filters ∗ previous weights. Chorowski et al. 2015, equations 8 and 9.

  A true (flipping) convolution, zero-padded and centred: f[c, s] = convolve(previous, filters[c])[W // 2 + s].
  """
  mixed = _einsum('cs,cf->sf', _convolve(previous, filters), at_least_float32(u))
  return additive(query, at_least_float32(key) + mixed, v=v)


def _location_sensitive_reverse(query, key, *, previous, filters, u, v):
  """`location_sensitive` with the gradient of `_mix_channels`."""
  mixed = _mix_channels(*vary_alike((_convolve(previous, filters), at_least_float32(u))))
  return additive(query, at_least_float32(key) + mixed, v=v)


def _convolve(previous: Float[Array, ' S'], filters: Float[Array, 'C W']) -> Float[Array, 'C S']:
  """Convolution of the previous weights with every filter, see `location_sensitive`."""
  filters = at_least_float32(filters)
  width = filters.shape[1]
  after = width // 2
  flipped = filters[:, None, ::-1]  # jax.lax computes a correlation
  padding = [(width - 1 - after, after)]
  return jax.lax.conv_general_dilated(previous.astype(filters.dtype)[None, None], flipped, (1,), padding)[0]


@jax.custom_vjp
def _mix_channels(x: Float[Array, 'C S'], u: Float[Array, 'C F']) -> Float[Array, 'S F']:
  """xᵀ u, with gradients that are faster on CPUs. The number C of channels is small.

  In the gradients of an einsum, the cotangent [S, F] is the left factor, so that the products have C columns. XLA for
  CPU computes these six times slower than the products with C rows below.
  """
  return _einsum('cs,cf->sf', x, u)


def _mix_channels_fwd(x: Array, u: Array):
  return _mix_channels(x, u), (x, u)


def _mix_channels_bwd(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
  x, u = residuals
  return _einsum('cf,sf->cs', u, g).astype(x.dtype), _einsum('cs,sf->cf', x, g).astype(u.dtype)


_mix_channels.defvjp(_mix_channels_fwd, _mix_channels_bwd)


def coverage(
  query: Float[Array, ' F'],
  key: Float[Array, 'S F'],
  *,
  coverage: Float[Array, ' S'],
  u: Float[Array, ' F'],
  v: Float[Array, ' F'],
) -> Scores:
  """eₛ = vᵀ tanh(q + kₛ + u cₛ), c = the sum of all weights so far. See, Liu & Manning 2017, equation 11.

  As in `additive`, the bias inside the tanh is omitted.
  """
  return additive(query, at_least_float32(key) + _outer(coverage, u), v=v)


def fertility(
  query: Float[Array, ' F'],
  key: Float[Array, 'S F'],
  *,
  coverage: Float[Array, ' S'],
  u: Float[Array, ' F'],
  v: Float[Array, ' F'],
  w: Float[Array, ' F'],
  max_fertility: float = 2.0,
) -> Scores:
  """eₛ = vᵀ tanh(q + kₛ + u cₛ/Φₛ), Φₛ = N σ(wᵀ kₛ): coverage relative to the fertility of a position. Tu et al. 2016.

  c is the sum of all weights so far, and N is `max_fertility`. Φ is at least 10⁻⁶, which prevents a division by 0.

  Raises:
    UserError: unless max_fertility > 0.
  """
  if not max_fertility > 0:
    raise UserError(f'fertility: max_fertility must be greater than 0, got {max_fertility}')
  fertilities = jnp.maximum(max_fertility * jax.nn.sigmoid(_einsum('sf,f->s', key, w)), 1e-6)
  relative_coverage = coverage / fertilities.astype(coverage.dtype)
  return additive(query, at_least_float32(key) + _outer(relative_coverage, u), v=v)


def _outer(x: Float[Array, ' S'], y: Float[Array, ' F']) -> Float[Array, 'S F']:
  """Outer product as an einsum, so that its gradients are products of a matrix and a vector.

  The gradients of x[:, None] * y would be sums over [S, F], each in a loop that recomputes the entries.
  """
  dtype = accumulation_dtype(x, y)
  return jnp.einsum('s,f->sf', x.astype(dtype), y.astype(dtype), precision=jax.lax.Precision.HIGHEST)


# The algebraic forms of the scores, in the order of the table: Product.fn and TanhSum.fn.


def _dot_product(query, key):
  _check_widths(query, key)
  return query, key


def _scaled_product(query, key, *, scale=None):
  _check_widths(query, key)
  return at_least_float32(query) * _scale('scaled_dot', scale, query.shape[-1]), key


def _general_product(query, key, *, w):
  return _einsum('q,qk->k', query, w), at_least_float32(key)


def _low_rank_product(query, key, *, u, v):
  return _einsum('q,qr->r', query, u), _einsum('sk,kr->sr', key, v)


def _cosine_product(query, key, *, beta):
  _check_widths(query, key)
  return beta * _unit(query), _unit(key)


def _normed_product(query, key, *, query_gain, key_gain, epsilon=0.0, scale=None):
  # Both gains are factors of the query, so that heads share the factor of a key.
  _check_widths(query, key)
  check_at_least('normed_dot', 'epsilon', epsilon, 0)
  size = query.shape[-1]
  # The root mean square of a vector is its norm divided by √D; one of the two factors √D cancels the score's 1 / √D.
  factor = size**0.5 if scale is None else size * _scale('normed_dot', scale, size)
  gain = factor * at_least_float32(query_gain) * at_least_float32(key_gain)
  return gain * _unit(query, size * epsilon), _unit(key, size * epsilon)


def _normed_query(query, *, query_gain, epsilon=0.0, scale=None):
  return _scale('normed_dot', scale, query.shape[-1]) * _normed_key(query, key_gain=query_gain, epsilon=epsilon)


def _normed_key(key, *, key_gain, epsilon=0.0):
  check_at_least('normed_dot', 'epsilon', epsilon, 0)
  size = key.shape[-1]
  return size**0.5 * at_least_float32(key_gain) * _unit(key, size * epsilon)


def _elu_product(query, key):
  _check_widths(query, key)
  return _elu_plus_one(query), _elu_plus_one(key)


def _elu_plus_one(x: Float[Array, '... D']) -> Float[Array, '... D']:
  """elu(x) + 1, without the rounding of a sum where it is small."""
  x = at_least_float32(x)
  return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0.0)))


def _additive_sum(query, key, *, v):
  return query, key, v, 0.0


def _normed_sum(query, key, *, v, gain, bias):
  return at_least_float32(query) + at_least_float32(bias), key, gain * _unit(v), 0.0


def _offset_sum(query, key, *, v, gain, bias, offset):
  return at_least_float32(query) + at_least_float32(bias), key, gain * _unit(v), offset


def _concat_sum(query, key, *, w, v):
  from_query = _einsum('d,df->f', query, w[: query.shape[-1]])
  from_key = _einsum('sd,df->sf', key, w[query.shape[-1] :])
  return from_query, from_key, v, 0.0


_V = Param(('features',), 'vector')
_NORMED = {'v': _V, 'gain': Param((), 'inverse_root'), 'bias': Param(('features',), 0.0)}

SCORES = check_table(
  {
    'dot': Row(dot, form=Product(_dot_product, rotation_invariant=True)),
    'scaled_dot': Row(scaled_dot, form=Product(_scaled_product, rotation_invariant=True)),
    'general': Row(general, params={'w': Param(('query', 'key'))}, form=Product(_general_product)),
    'low_rank': Row(
      low_rank,
      params={'u': Param(('query', 'rank')), 'v': Param(('key', 'rank'))},
      sizes={'rank': 32},
      form=Product(_low_rank_product),
    ),
    'additive': Row(additive, params={'v': _V}, project=True, form=TanhSum(_additive_sum)),
    'normed_additive': Row(normed_additive, params=_NORMED, project=True, form=TanhSum(_normed_sum)),
    'offset_additive': Row(
      offset_additive,
      params=_NORMED | {'offset': Param((), -1.0)},
      project=True,
      form=TanhSum(_offset_sum),
    ),
    'concat': Row(concat, params={'w': Param(('query+key', 'features')), 'v': _V}, form=TanhSum(_concat_sum)),
    'cosine': Row(cosine, params={'beta': Param((), 1.0)}, form=Product(_cosine_product, rotation_invariant=True)),
    'normed_dot': Row(
      normed_dot,
      params={'query_gain': Param(('query',), 1.0), 'key_gain': Param(('key',), 1.0)},
      form=Product(_normed_product, query_factor=_normed_query, key_factor=_normed_key),
    ),
    'elu_dot': Row(elu_dot, form=Product(_elu_product, nonnegative=True)),
    'location': Row(location, params={'w': Param(('max_positions', 'query'))}, sizes={'max_positions': 128}),
    'location_sensitive': Row(
      location_sensitive,
      params={'filters': Param(('channels', 'width')), 'u': Param(('channels', 'features')), 'v': _V},
      sizes={'channels': 10, 'width': 31},
      project=True,
      form=ReverseMode(_location_sensitive_reverse),
    ),
    'coverage': Row(coverage, params={'u': _V, 'v': _V}, project=True),
    'fertility': Row(fertility, params={'u': _V, 'v': _V, 'w': _V}, project=True),
  }
)
