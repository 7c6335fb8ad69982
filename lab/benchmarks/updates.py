"""Compares whole updates with implementation 'auto' of attention, the default of configs, and with 'xla'."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from attention_jax.losses.sequence import sequence_loss
from attention_jax.models.encoder_decoder import build
from attention_jax.systems.config import parse_config
from attention_jax.systems.translation.system import initializer
from attention_jax.training.partition import make_mesh
from attention_jax.training.seeds import prepare_training
from configs import cmudict, dates, multi30k
from lab.benchmarks.measure import BenchmarkContext, Side, Timing, compare
from lab.benchmarks.seeds import make_batch, repeated_update

# Sizes of the source and the target vocabulary.
MULTI30K_VOCABULARIES = (5921, 7859)
MULTI30K_SHARED_VOCABULARY = (7859, 7859)
DATES_VOCABULARIES = (400, 16)
# Overrides of the preset transformer2017_tiny that also set the implementation of its self-attention.
TRANSFORMER = {
  'model.encoder': "transformer(features=128, layers=4, heads=4, hidden=256, implementation='{implementation}')",
  'model.decoder': "transformer(features=128, layers=4, heads=4, hidden=256, implementation='{implementation}')",
}


class Case(NamedTuple):
  """A config and the lengths of a batch.

  Attributes:
    config: the config.
    vocab_sizes: sizes of the source and the target vocabulary.
    bucket: lengths of source and target.
    fields: other fields of the config, in which {implementation} stands for the implementation.
  """

  config: ConfigDict
  vocab_sizes: tuple[int, int]
  bucket: tuple[int, int]
  fields: Mapping[str, Any] = {}


CASES = {
  'dates:bahdanau2015_deep_tanh': Case(dates.get_config('bahdanau2015_deep_tanh'), DATES_VOCABULARIES, (42, 11)),
  'dates:chorowski2015': Case(dates.get_config('chorowski2015'), DATES_VOCABULARIES, (42, 11)),
  'cmudict:vinyals2015': Case(cmudict.get_config('vinyals2015'), (43, 43), (12, 12)),
  'multi30k:bahdanau2015_deep_tanh': Case(
    multi30k.get_config('bahdanau2015_deep_tanh'), MULTI30K_VOCABULARIES, (14, 14)
  ),
  'multi30k:vinyals2015': Case(multi30k.get_config('vinyals2015'), MULTI30K_SHARED_VOCABULARY, (14, 14)),
  'multi30k:transformer2017_small': Case(multi30k.get_config('transformer2017_small'), MULTI30K_VOCABULARIES, (14, 14)),
  **{
    f'multi30k:transformer2017_tiny, {batch_size} rows': Case(
      multi30k.get_config('transformer2017_tiny'),
      MULTI30K_SHARED_VOCABULARY,
      (length, length),
      TRANSFORMER | {'data.batch_size': batch_size},
    )
    for batch_size, length in ((16, 128), (8, 256), (2, 512))
  },
}


def auto_updates(bench: BenchmarkContext) -> Iterator[Timing]:
  """Times an update of each of CASES with both implementations of attention over the source.

  In cases with TRANSFORMER, self-attention uses the same implementation. In all others it uses 'auto' on both sides.
  """
  bench.log('compiling updates')
  updates = bench.compile_sides(
    {
      (name, implementation): functools.partial(_make_side, case, implementation)
      for name, case in CASES.items()
      for implementation in ('xla', 'auto')
    }
  )
  for name, case in CASES.items():
    bench.log(f"updates of {name} with 'xla' and 'auto'")
    sides = {key[-1]: side for key, side in updates.items() if key[0] == name}
    source, target = case.bucket
    yield from compare('auto', f'{name}, {source} -> {target}', sides, repeats=bench.repeats)


def _make_config(case: Case, implementation: str) -> ConfigDict:
  config = case.config.copy_and_resolve_references()
  fields = {
    name: value.format(implementation=implementation) if isinstance(value, str) else value
    for name, value in case.fields.items()
  }
  config.update_from_flattened_dict(fields | {'model.attention.implementation': implementation})
  return config


def _make_side(case: Case, implementation: str) -> Side:
  config = parse_config(_make_config(case, implementation))
  batch = make_batch(config.data.batch_size, case.vocab_sizes, case.bucket)
  model = build(config.model, *case.vocab_sizes)
  step, init_state = prepare_training(config.training, sequence_loss(model), initializer(model), make_mesh(), 0)
  return repeated_update(step, init_state(0), batch, 1)
