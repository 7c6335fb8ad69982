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

from attention_jax.atomic import write_folder_atomic
from attention_jax.data import vocab
from attention_jax.data.tasks import TranslationDataConfig
from attention_jax.errors import UserError, choose
from attention_jax.models.encoder_decoder import ModelConfig, build
from attention_jax.modules.attention import Attention
from attention_jax.modules.parameter_files import abbreviate_names, flatten_names, read_arrays, unflatten_names
from attention_jax.specs import format_spec
from attention_jax.systems.config import default_run_config, to_dict
from attention_jax.systems.export import write_checkpoint
from attention_jax.systems.text_evaluation import TextEvaluationConfig
from attention_jax.systems.translation.system import TranslationSystem
from attention_jax.tokens import BOS
from attention_jax.training.digests import add_file_digests
from attention_jax.training.folder import CONFIG, prepare_folder

Arrays = Mapping[str, np.ndarray]
WEIGHTS = 'model.safetensors'
BUCKETS = (32, 64, 128)  # lengths of both sides, as far as the model has positions for them
EXCLUDED = -1e4  # bias of a token that is a copy of another one: its probability is 0, the mean of all logits is finite
TASK = "text(train='train', validation='validation', test='test', source='source', target='target')"


class Order(NamedTuple):
  """What the arrays do not show: the row of the model of each id [V], and the number of heads."""

  rows: np.ndarray
  heads: int


# Conversions: (arrays there ..., order) -> the array here.


def _same(array: np.ndarray, order: Order) -> np.ndarray:
  return array


def _transposed(array: np.ndarray, order: Order) -> np.ndarray:
  return array.T


def _head_kernel(weight: np.ndarray, order: Order) -> np.ndarray:
  """[N F, D] -> [N, D, F]."""
  return weight.reshape(order.heads, -1, weight.shape[1]).swapaxes(1, 2)


def _head_bias(bias: np.ndarray, order: Order) -> np.ndarray:
  """[N F] -> [N, F]."""
  return bias.reshape(order.heads, -1)


def _no_bias(weight: np.ndarray, order: Order) -> np.ndarray:
  return np.zeros(len(weight), weight.dtype)


def _rows(table: np.ndarray, order: Order) -> np.ndarray:
  return table[order.rows]


def _columns(table: np.ndarray, order: Order) -> np.ndarray:
  return table[order.rows].T


def _output_bias(bias: np.ndarray, order: Order) -> np.ndarray:
  """Bias [1, V] of the logits; BOS is never emitted, and must not count twice if it is a copy of another token."""
  bias = bias[0, order.rows]
  is_copy = np.count_nonzero(order.rows == order.rows[BOS]) > 1
  return np.where((np.arange(len(bias)) == BOS) & is_copy, np.float32(EXCLUDED), bias)


def _positions_from_2(table: np.ndarray, order: Order) -> np.ndarray:
  """Positions count from 2 in BART, whose first two rows are not used."""
  return table[2:]


def _positions_with_type(table: np.ndarray, types: np.ndarray, order: Order) -> np.ndarray:
  """All tokens of BERT are of its first type."""
  return table + types[:1]


class Entry(NamedTuple):
  """An array of a module: its name here, its names there, and the conversion."""

  name: str
  sources: tuple[str, ...]
  convert: Callable[..., np.ndarray]


def _attention(query: str, key: str, value: str, output: str) -> tuple[Entry, ...]:
  """An attention whose projections have these names; a bias is left out by models without one."""
  entries = [Entry('join.kernel', (f'{output}.weight',), _transposed), Entry('join.bias', (f'{output}.bias',), _same)]
  for side, name in (('query', query), ('key', key), ('value', value)):
    entries.append(Entry(f'{side}_kernel.kernel', (f'{name}.weight',), _head_kernel))
    entries.append(Entry(f'{side}_kernel.bias', (f'{name}.bias',), _head_bias))
  return tuple(entries)


MODULES: Mapping[str, Sequence[Entry]] = {
  'embedding': (Entry('table.embedding', ('weight',), _rows),),
  'positions': (Entry('table', ('weight',), _positions_from_2),),
  'typed_positions': (
    Entry('table', ('position_embeddings.weight', 'token_type_embeddings.weight'), _positions_with_type),
  ),
  'buckets': (Entry('table', ('weight',), _transposed),),
  'norm': (Entry('scale', ('weight',), _same), Entry('bias', ('bias',), _same)),
  'dense': (Entry('kernel', ('weight',), _transposed), Entry('bias', ('bias',), _same)),
  'dense_without_bias': (Entry('kernel', ('weight',), _transposed), Entry('bias', ('weight',), _no_bias)),
  'output': (Entry('kernel', ('lm_head.weight',), _columns), Entry('bias', ('final_logits_bias',), _output_bias)),
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
  if config['d_kv'] * config['num_heads'] != config['d_model']:
    raise UserError(
      f'd_kv * num_heads must be d_model, got d_kv={config["d_kv"]}, num_heads={config["num_heads"]} and '
      f'd_model={config["d_model"]}'
    )
  buckets = {
    'buckets': config['relative_attention_num_buckets'],
    'max_distance': config['relative_attention_max_distance'],
  }
  options = {
    'features': config['d_model'],
    'heads': config['num_heads'],
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
  output = 'vocabulary' if 'lm_head.weight' in arrays else output
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
    r'pooler\..*|cls\..*|embeddings\.position_ids',
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
  with write_folder_atomic(epath.Path(folder)) as unfinished:
    config = pretrained.system.config
    prepare_folder(unfinished, to_dict(config))
    add_file_digests(unfinished, [CONFIG, *pretrained.system.save(str(unfinished))])
    write_checkpoint(pretrained.params, 0, config.training.average, unfinished)
  return pretrained


def read_pretrained(source: str, task: str = TASK, data_folder: str = 'data') -> Pretrained:
  """Returns a pretrained model as a system and its parameters. Arguments: see `import_model`.

  Raises:
    UserError: for files that are missing, damaged or do not fit each other, and for options that no module here has.
  """
  path = Path(source).expanduser()
  source_vocab, target_vocab, rows = vocab.from_pretrained(str(path))  # reads config.json, and checks its model_type
  fields = json.loads((path / 'config.json').read_text())
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
    functools.partial(TranslationSystem.load, config, str(path)),
  )
  return Pretrained(architecture, system, _convert(architecture, system, arrays, rows, f'{path / WEIGHTS}'))


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
  generation = path / 'generation_config.json'
  options = fields | (json.loads(generation.read_text()) if generation.exists() else {})
  return TextEvaluationConfig(
    metrics=('bleu', 'chrf'),
    beams=options.get('num_beams') or 1,
    alpha=float(options.get('length_penalty', 1.0)),
    length_penalty='power',
    no_repeat_ngram_size=options.get('no_repeat_ngram_size') or 0,
  )


def table_of(architecture: Architecture, layers: int) -> list[Entry]:
  """Returns the entries of all arrays that a model of this architecture may have, with whole names."""
  entries = []
  for name, source, kind in architecture.names:
    sides = ('encoder', 'decoder') if '{side}' in name else ('',)
    for side, layer in itertools.product(sides, range(layers) if '{layer}' in name else range(1)):
      here, there = (template.format(side=side, layer=layer) for template in (name, source))
      prefix = f'{there}.' if there else ''
      for entry in MODULES[kind]:
        entries.append(Entry(f'{here}.{entry.name}', tuple(prefix + name for name in entry.sources), entry.convert))
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
    weights[entry.name] = np.ascontiguousarray(entry.convert(*(arrays[name] for name in entry.sources), order))
  if not architecture.has_decoder:
    weights = flatten_names(system.initializer()(0)) | weights
  return unflatten_names(weights, like, path)
