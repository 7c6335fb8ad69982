"""Pretrained encoder-decoders in the layout of transformers, read as runs of translation and written back.

ARCHITECTURES has a row for each `model_type`: the model of this package that a config.json describes, and a table of
names. A row of this table is a module here, a module there, and their kind; MODULES has the arrays of each kind and
their conversions. {side} is encoder or decoder, and {layer} the number of a layer. Arrays that a model lacks, such as
the norm of embeddings of Marian, are left out of its table.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from attention_jax.atomic import write_text
from attention_jax.data import vocab
from attention_jax.data.files import read_json
from attention_jax.data.tasks import TranslationData, TranslationDataConfig
from attention_jax.errors import UserError, choose
from attention_jax.models.decoders import TransformerDecoder
from attention_jax.models.encoder_decoder import EncoderDecoder, ModelConfig, build
from attention_jax.modules.attention import Attention
from attention_jax.modules.parameter_files import (
  abbreviate_names,
  flatten_names,
  read_arrays,
  save_weights,
  unflatten_names,
)
from attention_jax.specs import format_spec
from attention_jax.systems.config import default_run_config
from attention_jax.systems.export import write_run
from attention_jax.systems.runs import Run
from attention_jax.systems.text_evaluation import TextEvaluationConfig
from attention_jax.systems.translation.system import TranslationSystem, initializer
from attention_jax.tokens import BOS, EOS, PAD

Arrays = Mapping[str, np.ndarray]
WEIGHTS = 'model.safetensors'
BUCKETS = (32, 64, 128)  # lengths of both sides, as far as the model has positions for them
EXCLUDED = -1e4  # bias of a token that is a copy of another one: its probability is 0, the mean of all logits is finite
TASK = "text(train='train', validation='validation', test='test', source='source', target='target')"


class Order(NamedTuple):
  """What the arrays do not show: the row of the model of each id [V], and the number of heads."""

  rows: np.ndarray
  heads: int


class Conversion(NamedTuple):
  """How an array is read, (arrays there ..., order) -> the array here, and how Marian's arrays are written back."""

  read: Callable[..., np.ndarray]
  write: Callable[[np.ndarray], np.ndarray] | None = None


def _read_output_bias(bias: np.ndarray, order: Order) -> np.ndarray:
  """Bias [1, V] of the logits; BOS is never emitted, and must not count twice if it is a copy of another token."""
  bias = bias[0, order.rows]
  is_copy = np.count_nonzero(order.rows == order.rows[BOS]) > 1
  return np.where((np.arange(len(bias)) == BOS) & is_copy, np.float32(EXCLUDED), bias)


SAME = Conversion(lambda array, order: array, lambda array: array)
TRANSPOSED = Conversion(lambda array, order: array.T, lambda array: array.T)
HEAD_KERNEL = Conversion(  # [N F, D] <-> [N, D, F]
  lambda weight, order: weight.reshape(order.heads, -1, weight.shape[1]).swapaxes(1, 2),
  lambda kernel: kernel.swapaxes(1, 2).reshape(-1, kernel.shape[1]),
)
HEAD_BIAS = Conversion(lambda bias, order: bias.reshape(order.heads, -1), lambda bias: bias.reshape(-1))
ROWS = Conversion(lambda table, order: table[order.rows], lambda table: table)
COLUMNS = Conversion(lambda table, order: table[order.rows].T)
OUTPUT_BIAS = Conversion(_read_output_bias, lambda bias: bias[None])
NO_BIAS = Conversion(lambda weight, order: np.zeros(len(weight), weight.dtype))
FROM_2 = Conversion(lambda table, order: table[2:])  # positions of BART count from 2
OF_TYPE_0 = Conversion(lambda table, types, order: table + types[:1])  # all tokens of BERT are of its first type


class ArrayRow(NamedTuple):
  """An array of a module: its name here, its names there, and the conversion."""

  name: str
  sources: tuple[str, ...]
  conversion: Conversion


def _attention(query: str, key: str, value: str, output: str) -> tuple[ArrayRow, ...]:
  """An attention whose projections have these names; a bias is left out by models without one."""
  entries = [
    ArrayRow('join.kernel', (f'{output}.weight',), TRANSPOSED),
    ArrayRow('join.bias', (f'{output}.bias',), SAME),
  ]
  for side, name in (('query', query), ('key', key), ('value', value)):
    entries.append(ArrayRow(f'{side}_kernel.kernel', (f'{name}.weight',), HEAD_KERNEL))
    entries.append(ArrayRow(f'{side}_kernel.bias', (f'{name}.bias',), HEAD_BIAS))
  return tuple(entries)


MODULES: Mapping[str, Sequence[ArrayRow]] = {
  'embedding': (ArrayRow('table.embedding', ('weight',), ROWS),),
  'positions': (ArrayRow('table', ('weight',), FROM_2),),
  'typed_positions': (ArrayRow('table', ('position_embeddings.weight', 'token_type_embeddings.weight'), OF_TYPE_0),),
  'buckets': (ArrayRow('table', ('weight',), TRANSPOSED),),
  'norm': (ArrayRow('scale', ('weight',), SAME), ArrayRow('bias', ('bias',), SAME)),
  'dense': (ArrayRow('kernel', ('weight',), TRANSPOSED), ArrayRow('bias', ('bias',), SAME)),
  'dense_without_bias': (ArrayRow('kernel', ('weight',), TRANSPOSED), ArrayRow('bias', ('weight',), NO_BIAS)),
  'output': (ArrayRow('kernel', ('lm_head.weight',), COLUMNS), ArrayRow('bias', ('final_logits_bias',), OUTPUT_BIAS)),
  'bart_attention': _attention('q_proj', 'k_proj', 'v_proj', 'out_proj'),
  't5_attention': _attention('q', 'k', 'v', 'o'),
  'bert_attention': _attention('self.query', 'self.key', 'self.value', 'output.dense'),
}

BART_NAMES = (
  ('encoder.embedding', 'shared', 'embedding'),
  ('{side}.positions', '{side}.embed_positions', 'positions'),
  ('{side}.embedding_norm', '{side}.layernorm_embedding', 'norm'),
  ('{side}.blocks_{layer}.attention', '{side}.layers.{layer}.self_attn', 'bart_attention'),
  ('{side}.blocks_{layer}.residuals_0.LayerNorm_0', '{side}.layers.{layer}.self_attn_layer_norm', 'norm'),
  ('{side}.blocks_{layer}.feed.Dense_0', '{side}.layers.{layer}.fc1', 'dense'),
  ('{side}.blocks_{layer}.feed.Dense_1', '{side}.layers.{layer}.fc2', 'dense'),
  ('encoder.blocks_{layer}.residuals_1.LayerNorm_0', 'encoder.layers.{layer}.final_layer_norm', 'norm'),
  ('decoder.blocks_{layer}.cross', 'decoder.layers.{layer}.encoder_attn', 'bart_attention'),
  ('decoder.blocks_{layer}.residuals_1.LayerNorm_0', 'decoder.layers.{layer}.encoder_attn_layer_norm', 'norm'),
  ('decoder.blocks_{layer}.residuals_2.LayerNorm_0', 'decoder.layers.{layer}.final_layer_norm', 'norm'),
  ('{side}.final_norm', '{side}.layer_norm', 'norm'),
  ('output', '', 'output'),
)
T5_NAMES = (
  ('encoder.embedding', 'shared', 'embedding'),
  ('{side}.positions', '{side}.block.0.layer.0.SelfAttention.relative_attention_bias', 'buckets'),
  ('{side}.blocks_{layer}.attention', '{side}.block.{layer}.layer.0.SelfAttention', 't5_attention'),
  ('{side}.blocks_{layer}.residuals_0.RMSNorm_0', '{side}.block.{layer}.layer.0.layer_norm', 'norm'),
  ('encoder.blocks_{layer}.feed.Dense_0', 'encoder.block.{layer}.layer.1.DenseReluDense.wi_0', 'dense_without_bias'),
  ('encoder.blocks_{layer}.feed.Dense_1', 'encoder.block.{layer}.layer.1.DenseReluDense.wo', 'dense_without_bias'),
  ('encoder.blocks_{layer}.feed.Dense_2', 'encoder.block.{layer}.layer.1.DenseReluDense.wi_1', 'dense_without_bias'),
  ('encoder.blocks_{layer}.residuals_1.RMSNorm_0', 'encoder.block.{layer}.layer.1.layer_norm', 'norm'),
  ('decoder.blocks_{layer}.cross', 'decoder.block.{layer}.layer.1.EncDecAttention', 't5_attention'),
  ('decoder.blocks_{layer}.residuals_1.RMSNorm_0', 'decoder.block.{layer}.layer.1.layer_norm', 'norm'),
  ('decoder.blocks_{layer}.feed.Dense_0', 'decoder.block.{layer}.layer.2.DenseReluDense.wi_0', 'dense_without_bias'),
  ('decoder.blocks_{layer}.feed.Dense_1', 'decoder.block.{layer}.layer.2.DenseReluDense.wo', 'dense_without_bias'),
  ('decoder.blocks_{layer}.feed.Dense_2', 'decoder.block.{layer}.layer.2.DenseReluDense.wi_1', 'dense_without_bias'),
  ('decoder.blocks_{layer}.residuals_2.RMSNorm_0', 'decoder.block.{layer}.layer.2.layer_norm', 'norm'),
  ('{side}.final_norm', '{side}.final_layer_norm', 'norm'),
  ('output', '', 'output'),
)
BERT_NAMES = (
  ('encoder.embedding', 'embeddings.word_embeddings', 'embedding'),
  ('encoder.positions', 'embeddings', 'typed_positions'),
  ('encoder.embedding_norm', 'embeddings.LayerNorm', 'norm'),
  ('encoder.blocks_{layer}.attention', 'encoder.layer.{layer}.attention', 'bert_attention'),
  ('encoder.blocks_{layer}.residuals_0.LayerNorm_0', 'encoder.layer.{layer}.attention.output.LayerNorm', 'norm'),
  ('encoder.blocks_{layer}.feed.Dense_0', 'encoder.layer.{layer}.intermediate.dense', 'dense'),
  ('encoder.blocks_{layer}.feed.Dense_1', 'encoder.layer.{layer}.output.dense', 'dense'),
  ('encoder.blocks_{layer}.residuals_1.LayerNorm_0', 'encoder.layer.{layer}.output.LayerNorm', 'norm'),
)

# Names of activations there -> keys of ACTIVATIONS.
ACTIVATIONS = {
  **{name: name for name in ('relu', 'gelu', 'gelu_new', 'silu')},
  'swish': 'silu',
  'gelu_pytorch_tanh': 'gelu_new',
  'gated-gelu': 'geglu_new',
  'gated-silu': 'swiglu',
}


def _activation(name: str) -> str:
  return ACTIVATIONS[choose(name, ACTIVATIONS, 'activation of a pretrained model:')]


def _bart_model(options: Mapping[str, Any], config: Mapping[str, Any], arrays: Arrays) -> ModelConfig:
  """The model of BART's form with further options of both stacks."""
  if not config['share_encoder_decoder_embeddings'] or not config['tie_word_embeddings']:
    raise UserError('embeddings that source, target and output do not share are not supported')
  options = options | {
    'features': config['d_model'],
    'bias': True,
    'activation': _activation(config['activation_function']),
    'scale_embeddings': config['scale_embedding'],
  }
  if options.pop('learned', False):
    options['position'] = format_spec('learned', {'max_positions': config['max_position_embeddings']})

  def stack(side: str) -> dict[str, Any]:
    sizes = {'layers': config[f'{side}_layers'], 'heads': config[f'{side}_attention_heads']}
    return options | sizes | {'hidden': config[f'{side}_ffn_dim']}

  return _transformer(stack('encoder'), stack('decoder'), 'tied', config['dropout'], config['attention_dropout'])


def _t5_model(config: Mapping[str, Any], arrays: Arrays) -> ModelConfig:
  buckets = {
    'buckets': config['relative_attention_num_buckets'],
    'max_distance': config['relative_attention_max_distance'],
  }
  options = {
    'features': config['d_model'],
    'heads': config['num_heads'],
    'head_dim': config['d_kv'],
    'hidden': config['d_ff'],
    'score': 'dot',
    'scale_embeddings': False,
    'position': format_spec('t5', buckets),
    'norm': 'rms',
    'norm_first': True,
    'epsilon': config['layer_norm_epsilon'],
    'activation': _activation(config['feed_forward_proj']),
  }
  decoder = options | {'layers': config['num_decoder_layers'] or config['num_layers']}
  output = format_spec('tied', {'scaled': True} if config['scale_decoder_outputs'] else {})
  if 'lm_head.weight' in arrays:
    if config['scale_decoder_outputs']:
      raise UserError('scale_decoder_outputs (or tie_word_embeddings) must be false for weights with an lm_head.weight')
    output = 'vocabulary'
  rate = config['dropout_rate']
  return _transformer(options | {'layers': config['num_layers']}, decoder, output, rate, rate)


def _bert_model(config: Mapping[str, Any], arrays: Arrays) -> ModelConfig:
  options = {
    'features': config['hidden_size'],
    'layers': config['num_hidden_layers'],
    'heads': config['num_attention_heads'],
    'hidden': config['intermediate_size'],
    'bias': True,
    'activation': _activation(config['hidden_act']),
    'scale_embeddings': False,
    'normalize_embeddings': True,
    'position': format_spec('learned', {'max_positions': config['max_position_embeddings']}),
    'epsilon': config['layer_norm_eps'],
  }
  rates = (config['hidden_dropout_prob'], config['attention_probs_dropout_prob'])
  return _transformer(options, options, 'tied', *rates)


def _transformer(
  encoder: dict[str, Any], decoder: dict[str, Any], output: str, dropout: float, attention_dropout: float
) -> ModelConfig:
  rate = {'attention_dropout': attention_dropout} if attention_dropout else {}
  return ModelConfig(
    encoder=format_spec('transformer', encoder | rate),
    decoder=format_spec('transformer', decoder | rate),
    output=output,
    embedding=encoder['features'],
    share_embeddings=True,
    dropout=dropout,
    attention=Attention(
      score=decoder.get('score', 'scaled_dot'),
      features=decoder['features'],
      heads=decoder['heads'],
      head_dim=decoder.get('head_dim', 0),
      bias=decoder.get('bias', False),
      dropout=attention_dropout,
    ),
  )


class Architecture(NamedTuple):
  """A row of ARCHITECTURES.

  Attributes:
    model: (fields of config.json, arrays) -> the model.
    names: the table of names.
    tokenizers: the files of the tokenizer of the source and of the target, or of both.
    defaults: fields that config.json may lack.
    renames: (pattern, replacement) of names of arrays in other versions of the layout.
    ignored: pattern of the names of arrays that the model does not need.
    has_decoder: whether it is more than an encoder.
  """

  model: Callable[[Mapping[str, Any], Arrays], ModelConfig]
  names: Sequence[tuple[str, str, str]]
  tokenizers: tuple[str, ...]
  defaults: Mapping[str, Any]
  renames: Sequence[tuple[str, str]] = ()
  ignored: str = '$^'
  has_decoder: bool = True


BART_DEFAULTS = {
  'activation_function': 'gelu',
  'attention_dropout': 0.0,
  'dropout': 0.1,
  'scale_embedding': False,
  'share_encoder_decoder_embeddings': True,
  'tie_word_embeddings': True,
}
T5_DEFAULTS = {
  'dropout_rate': 0.1,
  'feed_forward_proj': 'relu',
  'layer_norm_epsilon': 1e-6,
  'num_decoder_layers': None,
  'relative_attention_max_distance': 128,
  'relative_attention_num_buckets': 32,
}
BERT_DEFAULTS = {
  'attention_probs_dropout_prob': 0.1,
  'hidden_act': 'gelu',
  'hidden_dropout_prob': 0.1,
  'layer_norm_eps': 1e-12,
}
NORMALIZED = {'learned': True, 'normalize_embeddings': True}
WITHOUT_PREFIX = (r'^model\.', '')
ARCHITECTURES: Mapping[str, Architecture] = {
  'marian': Architecture(
    functools.partial(_bart_model, {}),
    BART_NAMES,
    ('source.spm', 'target.spm'),
    BART_DEFAULTS,
    (WITHOUT_PREFIX,),
    r'.*\.embed_positions\.weight',
  ),
  'bart': Architecture(
    functools.partial(_bart_model, NORMALIZED), BART_NAMES, ('tokenizer.json',), BART_DEFAULTS, (WITHOUT_PREFIX,)
  ),
  'mbart': Architecture(
    functools.partial(_bart_model, NORMALIZED | {'norm_first': True}),
    BART_NAMES,
    ('sentencepiece.bpe.model',),
    BART_DEFAULTS,
    (WITHOUT_PREFIX,),
  ),
  't5': Architecture(
    _t5_model,
    T5_NAMES,
    ('spiece.model',),
    T5_DEFAULTS,
    ((r'\.wi\.', '.wi_0.'),),
    r'.*\.EncDecAttention\.relative_attention_bias\.weight',
  ),
  'bert': Architecture(
    _bert_model,
    BERT_NAMES,
    ('tokenizer.json',),
    BERT_DEFAULTS,
    ((r'^bert\.', ''), (r'\.gamma$', '.weight'), (r'\.beta$', '.bias')),
    r'(pooler|cls|classifier|qa_outputs)\..*|embeddings\.position_ids',
    has_decoder=False,
  ),
}
SHARED = 'shared.weight'
TIED = ('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight', 'lm_head.weight')


class Pretrained(NamedTuple):
  """A pretrained model: the run that it is here.

  Attributes:
    architecture: the row of ARCHITECTURES.
    system: the system, whose config is that of the run.
    params: the parameters.
  """

  architecture: Architecture
  system: TranslationSystem
  params: Any


def import_model(source: str, folder: epath.PathLike, task: str = TASK, data_folder: str = 'data') -> Pretrained:
  """Writes the run folder of a pretrained model.

  Args:
    source: a folder as `save_pretrained` of transformers writes it.
    folder: the new run folder.
    task, data_folder: config.data.task and config.data.folder of the run, for its evaluation.

  Returns:
    The model.

  Raises:
    UserError: as `read_pretrained`, and if the folder cannot be written.
  """
  pretrained = read_pretrained(source, task, data_folder)
  write_run(pretrained.system, pretrained.params, folder)
  return pretrained


def read_pretrained(source: str, task: str = TASK, data_folder: str = 'data') -> Pretrained:
  """Returns a pretrained model as a system and its parameters. Arguments: see `import_model`.

  Raises:
    UserError: for files that are missing, damaged or do not fit each other, and for options that no module here has.
  """
  path = Path(source).expanduser()
  source_vocab, target_vocab, rows = vocab.from_pretrained(str(path))  # reads config.json, and checks its model_type
  fields = read_json(str(path / 'config.json'))
  architecture = ARCHITECTURES[choose(fields['model_type'], ARCHITECTURES, f'model_type of {path}/config.json:')]
  arrays = _read_weights(path, architecture)
  fields = architecture.defaults | fields
  fields.setdefault('scale_decoder_outputs', fields.get('tie_word_embeddings', True))
  try:
    model_config = architecture.model(fields, arrays)
  except KeyError as error:
    raise UserError(f'{path}/config.json: {error.args[0]} is missing') from None
  except UserError as error:
    raise UserError(f'{path}/config.json: {error}') from error
  tokenizers = [(path / name).read_bytes() for name in architecture.tokenizers]
  limit = fields.get('max_position_embeddings', max(BUCKETS))
  data = TranslationDataConfig(
    task=task,
    folder=data_folder,
    vocabulary=format_spec(source_vocab.kind, {'path': str(path / architecture.tokenizers[0])}),
    shared_vocabulary=len(set(tokenizers)) == 1,
    buckets=tuple((size, size) for size in sorted({min(size, limit) for size in BUCKETS})),
  )
  config = dataclasses.replace(
    default_run_config('translation'), model=model_config, data=data, evaluation=_evaluation(path, fields)
  )
  system = TranslationSystem(
    config,
    build(model_config, len(source_vocab), len(target_vocab)),
    source_vocab,
    target_vocab,
    data.buckets,
    _load_no_data,
  )
  return Pretrained(architecture, system, _convert(architecture, system, arrays, rows, f'{path / WEIGHTS}'))


def _load_no_data() -> TranslationData:
  raise UserError('a pretrained model has no data; expected the run that import_model writes')


def _read_weights(path: Path, architecture: Architecture) -> dict[str, np.ndarray]:
  """The arrays of model.safetensors under the names of the table, without those that are stored twice."""
  if not (path / WEIGHTS).exists():
    raise UserError(
      f'{path / WEIGHTS}: no such file; expected a folder as save_pretrained of transformers writes it, with one file '
      'of weights'
    )
  arrays = {}
  for name, array in read_arrays(path / WEIGHTS).items():
    for pattern, replacement in architecture.renames:
      name = re.sub(pattern, replacement, name)
    arrays[name] = np.asarray(array, np.float32)
  if not architecture.has_decoder:
    return arrays
  if SHARED not in arrays and (copies := [name for name in TIED if name in arrays]):
    arrays[SHARED] = arrays[copies[0]]
  for name in TIED:
    if name in arrays and np.array_equal(arrays[name], arrays.get(SHARED)):
      del arrays[name]
  if SHARED in arrays:
    arrays.setdefault('final_logits_bias', np.zeros((1, len(arrays[SHARED])), np.float32))
  return arrays


def _evaluation(path: Path, fields: Mapping[str, Any]) -> TextEvaluationConfig:
  """The search that the model was stored with; the ranking of hypotheses is that of transformers."""
  options = fields | read_json(str(path / 'generation_config.json'), is_optional=True)
  return TextEvaluationConfig(
    metrics=('bleu', 'chrf'),
    beams=options.get('num_beams') or 1,
    alpha=float(options.get('length_penalty', 1.0)),
    length_penalty='power',
    no_repeat_ngram_size=options.get('no_repeat_ngram_size') or 0,
    max_length=max(options.get('max_length', 1) - 1, 0),  # there the start token counts
  )


def table_of(architecture: Architecture, layers: int) -> list[ArrayRow]:
  """Returns the rows of all arrays that a model of this architecture may have, with whole names."""
  entries = []
  for name, source, kind in architecture.names:
    sides = ('encoder', 'decoder') if '{side}' in name else ('',)
    for side, layer in itertools.product(sides, range(layers) if '{layer}' in name else range(1)):
      here, there = (template.format(side=side, layer=layer) for template in (name, source))
      prefix = f'{there}.' if there else ''
      for entry in MODULES[kind]:
        entries.append(
          ArrayRow(f'{here}.{entry.name}', tuple(prefix + name for name in entry.sources), entry.conversion)
        )
  return entries


def _convert(architecture: Architecture, system: TranslationSystem, arrays: Arrays, rows: np.ndarray, path: str) -> Any:
  """The parameters of a system from the arrays of a model. Raises UserError, which begins with the path."""
  model = system.model
  like = jax.eval_shape(lambda: system.initializer()(0))
  expected = flatten_names(like)
  entries = [
    entry for entry in table_of(architecture, max(model.encoder.layers, model.decoder.layers)) if entry.name in expected
  ]
  sources = {name for entry in entries for name in entry.sources}
  if missing := sorted(sources - arrays.keys()):
    raise UserError(f'{path}: missing arrays ({len(missing)}): {abbreviate_names(missing)}')
  unknown = sorted(name for name in arrays.keys() - sources if not re.fullmatch(architecture.ignored, name))
  if unknown:
    raise UserError(f'{path}: arrays that are not of this model ({len(unknown)}): {abbreviate_names(unknown)}')
  if len(arrays[entries[0].sources[0]]) <= rows.max():
    raise UserError(
      f'{path}: {entries[0].sources[0]} must have vocab_size rows, got {len(arrays[entries[0].sources[0]])}'
    )
  weights = {}
  for entry in entries:
    side = model.decoder if entry.name.startswith('decoder') else model.encoder
    order = Order(rows, side.heads)
    inputs = [arrays[name] for name in entry.sources]
    try:
      weights[entry.name] = np.ascontiguousarray(entry.conversion.read(*inputs, order))
    except (ValueError, IndexError):
      raise UserError(f'{path}: {entry.sources[0]} cannot have the shape {list(inputs[0].shape)}') from None
  if not architecture.has_decoder:
    weights = flatten_names(system.initializer()(0)) | weights
  return unflatten_names(weights, like, path)


# Fields of modules that do not change the results of a trained model, or that are compared as modules of their own.
NOT_COMPARED = {'attention', 'bias', 'dtype', 'embedding', 'implementation', 'layer_attentions', 'name', 'output_scale'}
NOT_COMPARED |= {'attention_dropout', 'dropout', 'layer_dropout', 'parent', 'positions', 'remat', 'weights_layer'}
NOT_COMPARED |= {'project_values'}


def write_marian(run: Run, folder: Path) -> None:
  """Writes a run in the layout of MarianMT; ids are those of the run, and projections without biases get zeros.

  Args:
    run: the run.
    folder: an existing folder.

  Raises:
    UserError: for a model that MarianMT cannot represent, and for vocabularies other than sentencepiece models.
  """
  system = run.system
  if not isinstance(system, TranslationSystem) or not isinstance(system.model.decoder, TransformerDecoder):
    raise UserError(f'{run.folder}: expected a run of translation with a Transformer, as MarianMT')
  vocabularies = {'source': system.source_vocab, 'target': system.target_vocab}
  models = {side: getattr(vocabulary, 'sentencepiece_model', None) for side, vocabulary in vocabularies.items()}
  if None in models.values() or not vocab.same_entries(*vocabularies.values()):
    raise UserError(
      f'{run.folder}: MarianMT has sentencepiece models with the same pieces on both sides, got config.data.vocabulary='
      f'{system.config.data.vocabulary!r} and config.data.shared_vocabulary={system.config.data.shared_vocabulary}'
    )
  size = len(system.source_vocab)
  fields = _marian_fields(system.model, size)
  expected = _bart_model({}, BART_DEFAULTS | fields, {})
  _check_represented(run, expected)
  weights = {name: np.asarray(leaf) for name, leaf in flatten_names(jax.device_get(run.params)).items()}
  shapes = flatten_names(jax.eval_shape(lambda: initializer(build(expected, size, size))(0)))
  arrays = {}
  for entry in table_of(ARCHITECTURES['marian'], max(system.model.encoder.layers, system.model.decoder.layers)):
    if entry.name in shapes:
      array = weights.get(entry.name, np.zeros(shapes[entry.name].shape, np.float32))
      prefix = '' if entry.name.startswith('output.') else 'model.'
      arrays[prefix + entry.sources[0]] = entry.conversion.write(array)
  save_weights(arrays, folder / WEIGHTS, {'format': 'pt'})
  evaluation = system.config.evaluation
  generation = {name: fields[name] for name in ('pad_token_id', 'eos_token_id', 'decoder_start_token_id')} | {
    'bad_words_ids': [[PAD], [BOS]],
    'early_stopping': 'never',
    'length_penalty': evaluation.alpha if evaluation.length_penalty == 'power' else 1.0,
    'max_length': run.predictor.max_length + 1,
    'num_beams': evaluation.beams,
  }
  names = {
    'source_lang': 'source',
    'target_lang': 'target',
    'separate_vocabs': False,
    'tokenizer_class': 'MarianTokenizer',
  }
  contents = {
    'config.json': fields,
    'generation_config.json': generation,
    'tokenizer_config.json': names | {'model_max_length': fields['max_position_embeddings']},
    'vocab.json': {system.source_vocab.id_to_token(id): id for id in range(size)},
  }
  for name, content in contents.items():
    write_text(folder / name, json.dumps(content, indent=2, ensure_ascii=False) + '\n')
  for side, model in models.items():
    (folder / f'{side}.spm').write_bytes(model)


def _marian_fields(model: EncoderDecoder, size: int) -> dict[str, Any]:
  """The config.json of MarianMT; `_check_represented` compares the model that it describes."""
  stacks = {'encoder': model.encoder, 'decoder': model.decoder}
  sizes = {'layers': 'layers', 'attention_heads': 'heads', 'ffn_dim': 'hidden'}
  return {
    f'{side}_{name}': getattr(stack, field) for side, stack in stacks.items() for name, field in sizes.items()
  } | {
    'architectures': ['MarianMTModel'],
    'model_type': 'marian',
    'activation_function': model.decoder.activation,
    'attention_dropout': model.decoder.attention_dropout,
    'd_model': model.decoder.features,
    'decoder_start_token_id': BOS,
    'decoder_vocab_size': size,
    'dropout': model.decoder.dropout,
    'eos_token_id': EOS,
    'forced_eos_token_id': None,
    'is_encoder_decoder': True,
    'max_position_embeddings': 512,
    'pad_token_id': PAD,
    'scale_embedding': model.decoder.scale_embeddings,
    'share_encoder_decoder_embeddings': True,
    'tie_word_embeddings': True,
    'vocab_size': size,
  }


def _check_represented(run: Run, expected: ModelConfig) -> None:
  """Raises UserError for the first option of a run that is not that of the model that is expected."""
  size = len(run.system.source_vocab)
  models = [run.model, build(expected, size, size)]
  parts = {
    'model.encoder': [model.encoder for model in models],
    'model.decoder': [model.decoder for model in models],
    'model.attention': [model.decoder.attention for model in models],
  }
  values = [
    (f'{part}.{field.name}', *(getattr(module, field.name, None) for module in modules))
    for part, modules in parts.items()
    for field in dataclasses.fields(modules[1])
    if field.name not in NOT_COMPARED
  ]
  for name in ('output', 'share_embeddings', 'embedding'):
    values.append((f'model.{name}', getattr(run.config.model, name), getattr(expected, name)))
  for name, value, other in values:
    if value != other:
      raise UserError(f'{run.folder}: MarianMT cannot represent config.{name}={value!r}; expected {other!r}')
