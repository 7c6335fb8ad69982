"""Table of alignments: maps from scores [S] and a mask [S] (True = may be attended to) to weights [S].

Weights are float32 (float64 for float64 scores), exactly 0 where masked, and all 0 if every position is masked.
Alignments that keep a state return (weights, state).
"""

from attention_jax.functional.addressing import addressing
from attention_jax.functional.dense import (
  capped_softmax,
  capped_terms,
  coverage_penalised,
  hardmax,
  proportional,
  scalable_softmax,
  scalable_terms,
  sigmoid,
  sigmoid_by_length,
  sink_softmax,
  sink_terms,
  smoothed,
  smoothed_terms,
  softmax,
  softmax_terms,
  softpick,
  stick_breaking,
)
from attention_jax.functional.latent import (
  LatentAlignment,
  chain_posterior,
  init_chain,
  latent,
  latent_monotonic,
  observe_chain,
  posterior,
)
from attention_jax.functional.local import local_m, local_p, window_m, window_p, windowed
from attention_jax.functional.monotonic import (
  chunk_lookback,
  forward,
  forward_agent,
  hard_mocha,
  hard_monotonic,
  init_agent,
  init_at_first_position,
  init_forward,
  mocha,
  monotonic,
  project_values,
)
from attention_jax.functional.sampling import gumbel, gumbel_annealed, hard, hard_once, init_log_prob, init_samples
from attention_jax.functional.sparse import entmax, entmax15, sparsemax
from attention_jax.functional.table import LocalWindow, Param, RequiredLoss, Row, SoftmaxForm, check_table

# A layer of `features` tanh units over the query and a value or a context, followed by one linear unit.
_UNIT_PARAMS = {
  'w': Param(('query', 'features')),
  'u': Param(('value', 'features')),
  'bias': Param(('features',), 0.0),
  'v': Param(('features',), 'vector'),
}
_ADDRESSING_PARAMS = {name: Param(('query',), 'vector') for name in ('strength', 'gate', 'power')}
_ADDRESSING_PARAMS |= {name + '_bias': Param((), 0.0) for name in _ADDRESSING_PARAMS}
_ADDRESSING_PARAMS |= {'shift': Param(('shifts', 'query')), 'shift_bias': Param(('shifts',), 0.0)}

ALIGNMENTS = check_table(
  {
    'softmax': Row(
      softmax,
      optional={'length_scale': Param((), 0.43), 'sink': Param((), 0.0)},
      form=SoftmaxForm(softmax_terms),
    ),
    'sigmoid': Row(sigmoid),
    'sigmoid_by_length': Row(sigmoid_by_length),
    'softpick': Row(softpick),
    'smoothed': Row(smoothed, form=SoftmaxForm(smoothed_terms)),
    'sink_softmax': Row(sink_softmax, params={'sink': Param((), 0.0)}, form=SoftmaxForm(sink_terms)),
    'scalable_softmax': Row(scalable_softmax, params={'scale': Param((), 0.43)}, form=SoftmaxForm(scalable_terms)),
    'capped_softmax': Row(capped_softmax, form=SoftmaxForm(capped_terms)),
    'stick_breaking': Row(stick_breaking),
    'proportional': Row(proportional),
    'sparsemax': Row(sparsemax),
    'entmax15': Row(entmax15),
    'entmax': Row(entmax, params={'alpha': Param((), 1.5)}),
    'hardmax': Row(hardmax),
    'coverage_penalised': Row(coverage_penalised),
    'local_m': Row(local_m, form=LocalWindow(window_m)),
    'local_p': Row(
      local_p,
      params={'w': Param(('query', 'features')), 'v': Param(('features',), 'vector')},
      form=LocalWindow(window_p),
    ),
    'windowed': Row(windowed),
    'hard': Row(hard, at_test=hardmax, init_state=init_log_prob, training=RequiredLoss('reinforce')),
    'hard_once': Row(hard_once, at_test=hardmax, init_state=init_samples, training=RequiredLoss('reinforce')),
    'gumbel': Row(gumbel, at_test=hardmax),
    'gumbel_annealed': Row(gumbel_annealed, at_test=hardmax, params={'temperature': Param((), 1.0)}),
    'latent': Row(latent, training=LatentAlignment(None, posterior)),
    'latent_monotonic': Row(
      latent_monotonic, init_state=init_chain, training=LatentAlignment(observe_chain, chain_posterior)
    ),
    'monotonic': Row(monotonic, at_test=hard_monotonic, init_state=init_at_first_position, lookback=lambda: 0),
    'mocha': Row(
      mocha,
      at_test=hard_mocha,
      params=_UNIT_PARAMS,
      remember=project_values,
      init_state=init_at_first_position,
      lookback=chunk_lookback,
    ),
    'forward': Row(forward, init_state=init_forward),
    'forward_agent': Row(
      forward_agent,
      params=_UNIT_PARAMS | {'offset': Param((), 0.0)},
      remember=project_values,
      init_state=init_agent,
    ),
    'addressing': Row(addressing, params=_ADDRESSING_PARAMS, sizes={'shifts': 3}),
  }
)

__all__ = [
  'ALIGNMENTS',
  'addressing',
  'capped_softmax',
  'coverage_penalised',
  'entmax',
  'entmax15',
  'forward',
  'forward_agent',
  'gumbel',
  'gumbel_annealed',
  'hard',
  'hard_mocha',
  'hard_monotonic',
  'hard_once',
  'hardmax',
  'latent',
  'latent_monotonic',
  'local_m',
  'local_p',
  'mocha',
  'monotonic',
  'proportional',
  'scalable_softmax',
  'sigmoid',
  'sigmoid_by_length',
  'sink_softmax',
  'smoothed',
  'softmax',
  'softpick',
  'sparsemax',
  'stick_breaking',
  'windowed',
]
