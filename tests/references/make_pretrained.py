"""Makes pretrained/: small random models of transformers in its layout, with inputs and their answers.

  python tests/references/make_pretrained.py [FOLDER]
  python tests/references/make_pretrained.py --translate MARIAN < LINES

The tests read the files and do not run this program, which needs the packages of lab/requirements.txt. Each folder has
config.json, generation_config.json and model.safetensors as `save_pretrained` writes them, and answers.safetensors: a
batch of sources with padding, targets, the logits of teacher forcing, and the results of greedy and of beam search with
early_stopping='never'. The metadata of the answers name the versions. Weights are random, and fitted to
random targets in a few updates, without which hypotheses of random models do not end. The second command prints the
translation and its score for each line by a model that experiments.export has written.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

FOLDER = Path(__file__).parent / 'pretrained'
V, D, HEADS, HIDDEN, LAYERS = 61, 16, 2, 24, 2
B, S, T = 3, 19, 7
MAX_LENGTH = 24  # tokens of a hypothesis, the start token excluded
BEAMS = 4
PENALTIES = {'1': 1.0, '06': 0.6}

BART = {
  'vocab_size': V,
  'd_model': D,
  'encoder_layers': LAYERS,
  'decoder_layers': LAYERS,
  'encoder_attention_heads': HEADS,
  'decoder_attention_heads': HEADS,
  'encoder_ffn_dim': HIDDEN,
  'decoder_ffn_dim': HIDDEN,
  'max_position_embeddings': 40,
  'forced_eos_token_id': None,
}
T5 = {
  'vocab_size': V,
  'd_model': D,
  'd_kv': D // HEADS,
  'd_ff': HIDDEN,
  'num_layers': LAYERS,
  'num_heads': HEADS,
  'relative_attention_num_buckets': 8,
  'relative_attention_max_distance': 14,
  'pad_token_id': 0,
  'eos_token_id': 1,
  'decoder_start_token_id': 0,
}
BART_IDS = {'bos_token_id': 0, 'pad_token_id': 1, 'eos_token_id': 2}
MARIAN_IDS = {'pad_token_id': V - 1, 'eos_token_id': 0, 'decoder_start_token_id': V - 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  'marian': ('Marian', BART | MARIAN_IDS | {'activation_function': 'swish', 'scale_embedding': True}),
  'bart': ('Bart', BART | BART_IDS | {'activation_function': 'gelu', 'decoder_start_token_id': 2}),
  'mbart': (
    'MBart',
    BART | BART_IDS | {'activation_function': 'gelu', 'scale_embedding': True, 'decoder_start_token_id': V - 3},
  ),
  't5': ('T5', T5 | {'feed_forward_proj': 'relu'}),
  't5_gated': ('T5', T5 | {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False, 'd_kv': 12}),
}
BERT = {
  'vocab_size': V,
  'hidden_size': D,
  'num_hidden_layers': LAYERS,
  'num_attention_heads': HEADS,
  'intermediate_size': HIDDEN,
  'max_position_embeddings': 40,
  'pad_token_id': 0,
}


def randomize(module: nn.Module, seed: int) -> nn.Module:
  """Replaces initial values such as 0 and 1, which would hide exchanged weights."""
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for name, array in module.state_dict().items():
      if 'embed_positions' not in name or 'marian' not in type(module).__name__.lower():
        array.copy_(torch.randn(array.shape, generator=generator) * 0.4)
  return module.eval()


def make_model(name: str, seed: int) -> nn.Module:
  architecture, fields = MODELS[name]
  config = getattr(transformers, f'{architecture}Config')(**fields)
  suffix = 'MTModel' if architecture == 'Marian' else 'ForConditionalGeneration'
  model = getattr(transformers, architecture + suffix)(config)
  if fields.get('tie_word_embeddings') is False:
    model.lm_head.weight = nn.Parameter(torch.zeros(V, D))
  return randomize(model, seed)


def fit(model: nn.Module, source: torch.Tensor, mask: torch.Tensor, updates: int, seed: int) -> None:
  """Fits the model to random targets of several lengths, so that its hypotheses end before the maximum length."""
  target = torch.randint(4, V - 4, (B, 10), generator=torch.Generator().manual_seed(seed))
  for row, length in enumerate((9, 4, 6)):
    target[row, length] = model.config.eos_token_id
    target[row, length + 1 :] = -100
  optimizer = torch.optim.Adam(model.parameters(), 0.01)
  for _ in range(updates):
    loss = model(input_ids=source, attention_mask=mask.long(), labels=target).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def make_source(pad: int, eos: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
  generator = torch.Generator().manual_seed(seed)
  lengths = torch.tensor([S, S - 6, 3])[:B]
  source = torch.randint(4, V - 4, (B, S), generator=generator)
  mask = torch.arange(S) < lengths[:, None]
  source[torch.arange(B), lengths - 1] = eos
  return torch.where(mask, source, pad), mask


def search(model: nn.Module, source: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor] | None:
  """Results of greedy and beam search; None if a hypothesis does not end before the maximum length."""
  options = {
    'input_ids': source,
    'attention_mask': mask.long(),
    'max_new_tokens': MAX_LENGTH,
    'bad_words_ids': [[model.config.pad_token_id]],
    'do_sample': False,
    'return_dict_in_generate': True,
    'output_scores': True,
  }
  greedy = model.generate(num_beams=1, **options)
  answers = {'greedy': greedy.sequences}
  for name, penalty in PENALTIES.items():
    found = model.generate(
      num_beams=BEAMS, num_return_sequences=BEAMS, early_stopping='never', length_penalty=penalty, **options
    )
    answers |= {f'beam_{name}': found.sequences, f'scores_{name}': found.sequences_scores}
  eos = model.config.eos_token_id
  sequences = [row[1:] for key, rows in answers.items() if not key.startswith('scores') for row in rows]
  if not all((row[: MAX_LENGTH - 1] == eos).any() for row in sequences):
    return None
  lengths = [int((row == eos).nonzero()[0]) + 1 for row in sequences]
  return answers if max(lengths) >= 5 and len(set(lengths)) > 3 else None


def sequence_to_sequence(name: str, folder: Path) -> None:
  for seed, updates in itertools.product(range(5), (30, 60, 90)):
    model = make_model(name, seed)
    ids = model.config
    source, mask = make_source(ids.pad_token_id, ids.eos_token_id, seed)
    target = torch.randint(4, V - 4, (B, T), generator=torch.Generator().manual_seed(seed + 1))
    inputs = torch.cat([torch.full((B, 1), ids.decoder_start_token_id), target[:, :-1]], 1)
    fit(model, source, mask, updates, seed)
    with torch.inference_mode():
      answers = search(model, source, mask)
      logits = model(input_ids=source, attention_mask=mask.long(), decoder_input_ids=inputs).logits
    if answers:
      break
  save(model, folder / name, source=source, mask=mask, target=target, logits=logits, **answers)
  if name == 't5_gated':
    # transformers 5 ties these weights whatever the config; published models of T5 1.1 do not.
    weights = load_file(folder / name / 'model.safetensors')
    save_file(weights | {'lm_head.weight': model.lm_head.weight.detach()}, folder / name / 'model.safetensors')
    config = json.loads((folder / name / 'config.json').read_text())
    config.pop('scale_decoder_outputs', None)
    (folder / name / 'config.json').write_text(json.dumps(config | {'tie_word_embeddings': False}, indent=2))


def bert(folder: Path) -> None:
  model = randomize(transformers.BertModel(transformers.BertConfig(**BERT)), 0)
  source, mask = make_source(0, 12, 0)
  source[:, 0] = 11
  memory = model(input_ids=source, attention_mask=mask.long()).last_hidden_state
  save(model, folder / 'bert', source=source, mask=mask, memory=memory)


def translate(folder: str, lines: list[str]) -> None:
  model = transformers.MarianMTModel.from_pretrained(folder).eval()
  tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
  for line in lines:
    found = model.generate(**tokenizer([line], return_tensors='pt'), return_dict_in_generate=True, output_scores=True)
    print(
      json.dumps([tokenizer.decode(found.sequences[0], skip_special_tokens=True), float(found.sequences_scores[0])])
    )


def save(model: nn.Module, folder: Path, **arrays: torch.Tensor) -> None:
  model.save_pretrained(folder)
  versions = {'torch': torch.__version__, 'transformers': transformers.__version__}
  arrays = {key: value.detach().clone().contiguous() for key, value in arrays.items()}
  arrays = {key: value.int() if value.dtype == torch.int64 else value for key, value in arrays.items()}
  save_file(arrays, folder / 'answers.safetensors', versions)
  print(folder)


if __name__ == '__main__':
  if sys.argv[1:2] == ['--translate']:
    translate(sys.argv[2], sys.stdin.read().splitlines())
    sys.exit()
  target_folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
  torch.set_num_threads(1)
  for model_name in MODELS:
    sequence_to_sequence(model_name, target_folder)
  bert(target_folder)
