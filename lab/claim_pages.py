"""The claims that were measured again: the sweep of each, and the tables and the picture of its page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attention_jax import atomic
from attention_jax.sweeps.collect import SettingRuns
from attention_jax.systems.base import Log
from lab.claim_rows import (
  Factor,
  bin_rows,
  conditions,
  finished_settings,
  gradient_rows,
  probe_rows,
  setting_rows,
)
from lab.configs.scaled_dot import HEADS
from lab.explanation_measures import MeasureOptions
from lab.explanations import Study, explanation_rows
from lab.record_plots import Plot, draw_rows
from lab.records import Column, Table, write_table
from lab.result_tables import PROJECT, write_documents

# name of the table -> table, and the plot of its picture, or None; at most one table of a claim has a picture
Tables = Mapping[str, tuple[Table, Plot | None]]
GRADIENT_WORDS = 150  # words of the validation split whose gradients are measured
MEASURED_WIDTH = 64  # of the models whose gradients and states are measured
PROBE_WORDS = 200  # for fitting, and as many for testing
PROBE_OFFSETS = (-2, -1, 0, 1, 2)  # positions of the probed tokens, relative to that of the state


class Claim(NamedTuple):
  """A claim of the literature.

  Attributes:
    page: the page in docs/claims/, without its suffix.
    sweep: the sweep file in lab/configs/, without its suffix.
    measure: the settings of the finished sweep -> the tables of the page.
  """

  page: str
  sweep: str
  measure: Callable[[Sequence[SettingRuns]], Tables]


def _factor_columns(factors: Sequence[str]) -> list[Column]:
  return [Column(name, [name]) for name in factors]


def _metric_columns(split: str, metrics: Mapping[str, str], differences: str) -> list[Column]:
  """Columns of metrics and, except for entropy, of their differences from the baseline.

  Args:
    split: the split.
    metrics: metric -> title.
    differences: title of the columns of differences; entropy has none, because neither low nor high values are better.
  """
  columns = []
  for metric, title in metrics.items():
    columns.append(Column(title, metric=f'{split}/{metric}'))
    if metric != 'entropy':
      columns.append(Column(differences, metric=f'{split}/{metric}', shows_difference=True))
  return columns


def _scaled_dot(settings: Sequence[SettingRuns]) -> Tables:
  factors = [
    Factor('model.attention.features', 'features of a head', lambda features: int(features) // HEADS),
    Factor('model.attention.score', 'score'),
  ]
  names = [factor.name for factor in factors]
  metrics = {'exact_match': 'exact match, %', 'alignment_error_rate': 'AER, %', 'entropy': 'entropy, nat'}
  rows = setting_rows(settings, 'test', list(metrics), factors, {'score': 'scaled_dot'}, within=names[:1])
  table = Table([*_factor_columns(names), *_metric_columns('test', metrics, 'difference from scaled_dot')], rows)
  panels = {f'test/{metric}': title for metric, title in metrics.items()}
  return {'scaled_dot': (table, Plot(names[0], panels, colour='score', log_x=True))}


DECODERS = {'plain(rnn="gru")': 'no attention', 'luong(rnn="gru")': 'attention'}
DECODER_FACTORS = (
  Factor('model.decoder', 'decoder', lambda decoder: DECODERS[decoder]),
  Factor('model.embedding', 'width', int),
)


def _bottleneck(settings: Sequence[SettingRuns]) -> Tables:
  names = [factor.name for factor in DECODER_FACTORS]
  metrics = {'phoneme_error_rate': 'PER, %', 'sequence_error_rate': 'WER, %'}
  rows = setting_rows(
    settings, 'validation', list(metrics), DECODER_FACTORS, {'decoder': 'no attention'}, within=names[1:]
  )
  columns = [*_factor_columns([*names, 'parameters']), *_metric_columns('validation', metrics, 'attention - none')]
  by_length = bin_rows(settings, 'validation', DECODER_FACTORS)
  length_columns = _factor_columns([*names, 'source length']) + [
    Column(title, metric=f'validation/{metric}') for metric, title in metrics.items()
  ]
  panels = {f'validation/{metric}': title for metric, title in metrics.items()}
  return {
    'bottleneck': (Table(columns, rows), None),
    'bottleneck_by_length': (
      Table(length_columns, by_length, shown={'source length': ['2 to 5', '8', '10 to 15']}),
      Plot('source length', panels, colour='width', style='decoder'),
    ),
  }


def _gradients(settings: Sequence[SettingRuns]) -> Tables:
  settings = [setting for setting in settings if DECODER_FACTORS[1].of(setting) == MEASURED_WIDTH]
  summaries, curves = gradient_rows(settings, 'validation', DECODER_FACTORS[:1], GRADIENT_WORDS)
  names = ['decoder', 'training']
  pairs = {'linked': 'linked positions', 'all': 'all positions'}
  factor_columns = [Column(f'factor per step, {title}', metric=f'{key}/factor') for key, title in pairs.items()]
  norm_columns = [Column(f'norm, {title}', metric=f'{key}/norm', digits=4) for key, title in pairs.items()]
  return {
    'gradients': (Table([*_factor_columns(names), *factor_columns], summaries), None),
    'gradients_by_distance': (
      Table([*_factor_columns([*names, 'distance']), *norm_columns], curves, shown={'distance': [1, 13]}),
      Plot(
        'distance',
        {f'{key}/norm': f'norm of the gradient, {title}' for key, title in pairs.items()},
        colour='decoder',
        style='training',
        log_y=True,
      ),
    ),
  }


def _probes(settings: Sequence[SettingRuns]) -> Tables:
  settings = [setting for setting in settings if DECODER_FACTORS[1].of(setting) == MEASURED_WIDTH]
  rows = probe_rows(settings, 'validation', DECODER_FACTORS[:1], PROBE_OFFSETS, PROBE_WORDS)
  columns = [
    *_factor_columns(['decoder', 'states', 'offset']),
    Column('accuracy of the probe, %', metric='probe/accuracy', digits=1),
  ]
  table = Table(columns, rows, shown={'offset': [-1, 0, 1]})
  return {'probes': (table, Plot('offset', {'probe/accuracy': 'accuracy, %'}, colour='decoder', style='states'))}


def _luong_grid(settings: Sequence[SettingRuns]) -> Tables:
  metrics = {'phoneme_error_rate': 'PER, %', 'sequence_error_rate': 'WER, %'}
  return _luong_parts('luong_grid', settings, 'validation', metrics)


def _luong_grid_multi30k(settings: Sequence[SettingRuns]) -> Tables:
  return _luong_parts('luong_grid_multi30k', settings, 'test', {'bleu': 'BLEU', 'chrf': 'chrF'})


def _luong_parts(name: str, settings: Sequence[SettingRuns], split: str, metrics: Mapping[str, str]) -> Tables:
  """The table and the picture of settings, with the parts in which each differs from the baseline."""
  factors = [
    Factor('model.attention.score', 'score', lambda score: score.partition('(')[0]),
    Factor('model.attention.alignment', 'alignment', lambda alignment: alignment.partition('(')[0]),
    Factor('model.decoder.input_feeding', 'input feeding', lambda feeding: 'yes' if feeding else 'no'),
  ]
  baseline = {'score': 'general', 'alignment': 'softmax', 'input feeding': 'yes'}
  rows = setting_rows(settings, split, list(metrics), factors, baseline)
  for row in rows:
    changed = [str(row['factors'][name]) for name, value in baseline.items() if row['factors'][name] != value]
    shown_as = {'no': 'no feeding'}
    row['factors']['changed part'] = ', '.join(shown_as.get(value, value) for value in changed) or 'none'
  factor_names = [factor.name for factor in factors]
  columns = [*_factor_columns([*factor_names, 'parameters']), *_metric_columns(split, metrics, 'difference')]
  panels = {f'{split}/{metric}': title for metric, title in metrics.items()}
  return {name: (Table(columns, rows), Plot('changed part', panels, joined=False))}


def _wiring(settings: Sequence[SettingRuns]) -> Tables:
  factors = [
    Factor('model.encoder', 'encoder', lambda spec: 'two directions' if spec.startswith('birnn') else 'one direction'),
    Factor('model.decoder', 'decoder', _describe_wiring),
  ]
  names = [factor.name for factor in factors]
  metrics = {'phoneme_error_rate': 'PER, %', 'alignment_error_rate': 'AER, %'}
  by_decoder = setting_rows(settings, 'validation', list(metrics), factors, {'decoder': 'Luong'}, within=names[:1])
  columns = [*_factor_columns([*names, 'parameters']), *_metric_columns('validation', metrics, 'difference from Luong')]
  by_encoder = setting_rows(
    settings, 'validation', list(metrics), factors, {'encoder': 'two directions'}, within=names[1:]
  )
  directions = [
    *_factor_columns(names[::-1]),
    *(
      Column(f'{title}: difference from two directions', metric=f'validation/{metric}', shows_difference=True)
      for metric, title in metrics.items()
    ),
  ]
  panels = {f'validation/{metric}': title for metric, title in metrics.items()}
  return {
    'wiring': (Table(columns, by_decoder), Plot('decoder', panels, colour='encoder', joined=False)),
    'wiring_directions': (Table(directions, by_encoder, shown={'encoder': ['one direction']}), None),
  }


def _describe_wiring(decoder: str) -> str:
  if decoder.startswith('bahdanau'):
    return 'Bahdanau'
  return 'Luong, no feeding' if 'input_feeding=False' in decoder else 'Luong'


def _heads(settings: Sequence[SettingRuns]) -> Tables:
  factors = [
    Factor('model.decoder', 'model', lambda decoder: 'Transformer' if decoder.startswith('trans') else 'recurrent'),
    Factor('model.attention.score', 'score'),
    Factor('model.attention.heads', 'heads', int),
  ]
  names = [factor.name for factor in factors]
  metrics = {'phoneme_error_rate': 'PER, %', 'alignment_error_rate': 'AER, %', 'entropy': 'entropy, nat'}
  rows = setting_rows(settings, 'validation', list(metrics), factors, {'heads': 1}, within=names[:2])
  columns = [*_factor_columns([*names, 'parameters']), *_metric_columns('validation', metrics, 'difference')]
  panels = {f'validation/{metric}': title for metric, title in list(metrics.items())[:2]}
  return {'heads': (Table(columns, rows), Plot('heads', panels, colour='model', style='score', log_x=True))}


def _alignments(settings: Sequence[SettingRuns]) -> Tables:
  return _compare_alignments('alignments', settings, 'validation', {'phoneme_error_rate': 'PER, %', **LINKS})


def _alignments_dates(settings: Sequence[SettingRuns]) -> Tables:
  return _compare_alignments('alignments_dates', settings, 'test', {'exact_match': 'exact match, %', **LINKS})


def _pretrained(settings: Sequence[SettingRuns]) -> Tables:
  return _compare_alignments('pretrained', settings, 'test', {'bleu': 'BLEU', 'chrf': 'chrF', **ENTROPY})


ENTROPY = {'entropy': 'entropy, nat'}
LINKS = {'alignment_error_rate': 'AER, %', **ENTROPY}


def _compare_alignments(name: str, settings: Sequence[SettingRuns], split: str, metrics: Mapping[str, str]) -> Tables:
  factors = [Factor('model.attention.alignment', 'alignment', lambda alignment: alignment.partition('(')[0])]
  rows = setting_rows(settings, split, list(metrics), factors, {'alignment': 'softmax'})
  columns = [*_factor_columns(['alignment']), *_metric_columns(split, metrics, 'difference from softmax')]
  panels = {f'{split}/{metric}': title for metric, title in list(metrics.items())[:2]}
  return {name: (Table(columns, rows), Plot('alignment', panels, joined=False))}


# Uniform weights are those of a softmax with a very high temperature.
WEIGHTS = Factor('model.attention.alignment', 'weights', lambda spec: 'uniform' if 'temperature' in spec else 'learned')
REVIEW_STUDY = Study(
  'validation', MeasureOptions(epsilon=0.01), num_explained=150, num_probe_train=4000, num_probe_test=1000
)
WORD_STUDY = Study(
  'validation', MeasureOptions(epsilon=0.05, steps=100), num_explained=50, num_probe_train=200, num_probe_test=200
)


def _explanation_reviews(settings: Sequence[SettingRuns]) -> Tables:
  encoder = Factor(
    'model.encoder', 'encoder', lambda spec: 'recurrent' if spec.startswith('birnn') else 'embeddings alone'
  )
  return _explanation('explanation_reviews', settings, [encoder], {'accuracy': 'accuracy, %'}, REVIEW_STUDY)


def _explanation_words(settings: Sequence[SettingRuns]) -> Tables:
  metrics = {'phoneme_error_rate': 'PER, %', 'sequence_error_rate': 'WER, %'}
  return _explanation('explanation_words', settings, [], metrics, WORD_STUDY)


def _explanation(
  name: str, settings: Sequence[SettingRuns], factors: Sequence[Factor], metrics: Mapping[str, str], study: Study
) -> Tables:
  """Returns the tables of the explanation measures, of the models with learned and with uniform weights, and of probes.

  Only the models with learned weights are explained and probed.
  """
  names = [factor.name for factor in factors]
  models = setting_rows(settings, study.split, list(metrics), [*factors, WEIGHTS], {'weights': 'learned'}, within=names)
  learned = [setting for setting in settings if WEIGHTS.of(setting) == 'learned']
  measures, probes = explanation_rows(learned, factors, study)
  interval = Column('95 % interval over examples', ['interval'])
  value = {'explanation/value': 'mean of the examples'}
  return {
    name: (
      Table(
        [*_factor_columns([*names, 'measure']), Column('value', metric='explanation/value', digits=3), interval],
        measures,
      ),
      Plot('measure', value, colour=''.join(names), joined=False),
    ),
    f'{name}_models': (
      Table(
        [
          *_factor_columns([*names, 'weights', 'parameters']),
          *_metric_columns(study.split, metrics, 'uniform - learned'),
        ],
        models,
      ),
      None,
    ),
    f'{name}_probes': (
      Table(
        [
          *_factor_columns([*names, 'weights']),
          Column('accuracy of the guided probe, %', metric='probe/accuracy', digits=1),
          Column('95 % interval over outputs', ['interval']),
        ],
        probes,
      ),
      None,
    ),
  }


CLAIMS: Mapping[str, Claim] = {
  'bottleneck': Claim('a_bottleneck', 'bottleneck', _bottleneck),
  'gradients': Claim('b_gradients', 'bottleneck', _gradients),
  'luong_grid': Claim('c_luong_grid', 'luong_grid', _luong_grid),
  'luong_grid_multi30k': Claim('c_luong_grid_multi30k', 'luong_grid', _luong_grid_multi30k),
  'wiring': Claim('d_wiring', 'wiring', _wiring),
  'scaled_dot': Claim('e_scaled_dot', 'scaled_dot', _scaled_dot),
  'alignments': Claim('f_alignments', 'alignments', _alignments),
  'alignments_dates': Claim('f_alignments_dates', 'alignments', _alignments_dates),
  'heads': Claim('g_heads', 'heads', _heads),
  'explanation_reviews': Claim('h_explanation_reviews', 'explanation_reviews', _explanation_reviews),
  'explanation_words': Claim('h_explanation_words', 'explanation_words', _explanation_words),
  'probes': Claim('i_probes', 'bottleneck', _probes),
  'pretrained': Claim('j_pretrained', 'pretrained', _pretrained),
}


def measure_claim(claim: Claim, folder: Path, hardware: str, log: Log, root: Path = PROJECT) -> None:
  """Writes the records and the picture of a claim, and every document whose tables differ from the records.

  Args:
    claim: the claim.
    folder: the folder of its finished sweep.
    hardware: the hardware on which the sweep was run.
    log: called with a line for each record and picture; those for documents are printed.
    root: the folder of lab/ and docs/.
  """
  for name, (table, plot) in claim.measure(finished_settings(folder)).items():
    path = root / 'lab' / 'results' / 'claims' / f'{name}.json'
    write_table(path, table._replace(conditions=conditions(folder, hardware)))
    log(f'written to {path}')
    if plot:
      picture = root / 'docs' / 'claims' / f'{claim.page}.png'
      atomic.write_bytes(picture, draw_rows(table, plot))
      log(f'written to {picture}')
  write_documents(root)
