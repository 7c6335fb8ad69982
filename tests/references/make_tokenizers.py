"""Makes tokenizers.tar.xz: folders of tokenizers as `transformers` stores them, lines, and the answers of transformers.

  python tests/references/make_tokenizers.py

The tests read the archive and do not run this program, which needs transformers, sentencepiece, tokenizers and Faker.
The archive in the repository is of transformers 4.57.3, whose tokenizers of T5, mBART and Marian call sentencepiece.
The tokenizers are trained on the lines, which are in several scripts, so that nothing is downloaded. Some characters
are in no vocabulary.

For each folder, answers.json has a digest per line: of the input of the encoder, of the labels of the decoder and of
their decoded text. `digest` is what the tests compute as well.
"""

import hashlib
import json
import random
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).parent / 'tokenizers.tar.xz'
LOCALES = 'en_US de_DE fr_FR cs_CZ ru_RU uk_UA el_GR ar_AA hi_IN zh_CN ja_JP ko_KR'
NUM_LINES = 1000
ENDINGS = [
  '',
  '.',
  ' .',
  '!',
  ' ?',
  ' 😀',
  ' 👩‍👩‍👧 ½ ﬁ',
  '  two  spaces',
  "; it's we 're, don't",
  ' [x] "q" #1',
  '\u00a0x',
  ' e\u0301',
]


def digest(source: Sequence[int], target: Sequence[int], text: str) -> str:
  """Returns a digest of a line as source and as target, in ids of the model, and of the decoded target."""
  content = json.dumps([[int(id) for id in source], [int(id) for id in target], text])
  return hashlib.blake2b(content.encode(), digest_size=3).hexdigest()


def make_lines() -> list[str]:
  from faker import Faker

  rng = random.Random(0)
  fakers = [Faker(locale) for locale in LOCALES.split()]
  for i, faker in enumerate(fakers):
    faker.seed_instance(i)
  makers = [
    lambda faker: faker.sentence(8).rstrip('.'),
    lambda faker: f'{faker.name()}, {faker.city()} {rng.randint(0, 9999)}',
  ]
  return [rng.choice(makers)(fakers[i % len(fakers)]) + rng.choice(ENDINGS) for i in range(NUM_LINES)]


def train_sentencepiece(path: Path, lines: Sequence[str], **options: Any) -> list[str]:
  import sentencepiece

  with path.open('wb') as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines), model_writer=file, character_coverage=0.99, minloglevel=2, **options
    )
  processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
  return [processor.id_to_piece(id) for id in range(processor.get_piece_size())]


def write_json(path: Path, **content: Any) -> None:
  path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding='utf-8')


def make_marian(folder: Path, lines: Sequence[str]) -> Any:
  from transformers import MarianTokenizer

  source = train_sentencepiece(folder / 'source.spm', lines[::2], vocab_size=1400, model_type='unigram')
  target = train_sentencepiece(
    folder / 'target.spm', lines, vocab_size=1400, model_type='bpe', normalization_rule_name='identity'
  )
  pieces = sorted({*source[3:], *target[3:]})
  left_out = [piece for piece in pieces if len(piece) > 2][::50]  # pieces that vocab.json lacks
  tokens = ['</s>', '<unk>', *(piece for piece in pieces if piece not in left_out), '>>fra<<', '>>deu<<', '<pad>']
  write_json(folder / 'vocab.json', **{token: id for id, token in enumerate(tokens)})
  write_json(folder / 'tokenizer_config.json', source_lang='en', target_lang='de')
  write_json(
    folder / 'config.json', model_type='marian', vocab_size=len(tokens), decoder_start_token_id=len(tokens) - 1
  )
  return MarianTokenizer.from_pretrained(folder)


def make_t5(folder: Path, lines: Sequence[str]) -> Any:
  from transformers import T5Tokenizer

  pieces = train_sentencepiece(
    folder / 'spiece.model', lines, vocab_size=1600, model_type='unigram', pad_id=0, eos_id=1, unk_id=2, bos_id=-1
  )
  write_json(folder / 'tokenizer_config.json', clean_up_tokenization_spaces=True, extra_ids=100)
  write_json(folder / 'config.json', model_type='t5', vocab_size=len(pieces) + 128)
  write_json(folder / 'generation_config.json', decoder_start_token_id=0)
  return T5Tokenizer.from_pretrained(folder)


def make_mbart(folder: Path, lines: Sequence[str]) -> Any:
  from transformers import MBartTokenizer

  pieces = train_sentencepiece(folder / 'sentencepiece.bpe.model', lines, vocab_size=1600, model_type='unigram')
  write_json(
    folder / 'config.json', model_type='mbart', vocab_size=len(pieces) + 27, decoder_start_token_id=len(pieces) + 20
  )
  return MBartTokenizer.from_pretrained(folder, src_lang='en_XX', tgt_lang='ro_RO')


def make_bart(folder: Path, lines: Sequence[str]) -> Any:
  import tokenizers
  from transformers import BartTokenizerFast

  tokenizer = tokenizers.ByteLevelBPETokenizer()
  special = ['<s>', '<pad>', '</s>', '<unk>', '<mask>']
  tokenizer.train_from_iterator(lines, vocab_size=1200, special_tokens=special)
  tokenizer.save_model(str(folder))
  tokenizer = BartTokenizerFast.from_pretrained(folder, model_max_length=16)
  tokenizer('truncated', truncation=True, padding='max_length')  # tokenizer.json stores both settings
  tokenizer.backend_tokenizer.save(str(folder / 'tokenizer.json'))
  tokenizer = BartTokenizerFast.from_pretrained(folder)
  write_json(folder / 'config.json', model_type='bart', vocab_size=len(tokenizer) + 3, decoder_start_token_id=2)
  return tokenizer


def make_bert(folder: Path, lines: Sequence[str]) -> Any:
  import tokenizers
  from transformers import BertTokenizerFast

  tokenizer = tokenizers.BertWordPieceTokenizer()
  tokenizer.train_from_iterator(lines, vocab_size=1200, limit_alphabet=500)
  tokenizer.save_model(str(folder))
  tokenizer = BertTokenizerFast.from_pretrained(folder)
  tokenizer.backend_tokenizer.save(str(folder / 'tokenizer.json'))
  write_json(folder / 'config.json', model_type='bert', vocab_size=len(tokenizer))
  return BertTokenizerFast.from_pretrained(folder)  # with another default of clean_up_tokenization_spaces


def answers(tokenizer: Any, lines: Sequence[str]) -> list[str]:
  """The digest of each line. mBART's language code after EOS is left out, which vocabularies do not add."""
  rows = []
  for line in lines:
    source, target = tokenizer(line)['input_ids'], tokenizer(text_target=line)['input_ids']
    text = tokenizer.decode(target, skip_special_tokens=True)
    without_code = slice(None, -1 if hasattr(tokenizer, 'lang_code_to_id') else None)
    rows.append(digest(source[without_code], target[without_code], text))
  return rows


def main() -> None:
  lines = make_lines()
  makers = {'marian': make_marian, 't5': make_t5, 'mbart': make_mbart, 'bart': make_bart, 'bert': make_bert}
  with tempfile.TemporaryDirectory() as temporary:
    root = Path(temporary)
    tested = ['', ' ', '>>deu<< code', 'x' * 200, *lines[4:]]
    (root / 'lines.json').write_text(json.dumps(tested, ensure_ascii=False, indent=0), encoding='utf-8')
    for name, make in makers.items():
      folder = root / name
      folder.mkdir()
      (folder / 'answers.json').write_text(json.dumps(answers(make(folder, lines), tested)))
    with tarfile.open(ARCHIVE, 'w:xz', preset=9) as archive:
      for path in sorted(root.rglob('*')):
        if path.is_file():
          information = archive.gettarinfo(path, str(path.relative_to(root)))
          information.mtime = 0
          with path.open('rb') as file:
            archive.addfile(information, file)


if __name__ == '__main__':
  main()
