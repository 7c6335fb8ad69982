"""Floor 3': data on the host, with numpy and grain. Knows nothing of models.

files, text: lines and corpora. vocab: text <-> ids. encoding: splits as ids, and which bucket holds a row.
batching, pipeline: batches as a function of (seed, step). tasks: what a config can name. builders: tfds builders.
What only some tasks need (tensorflow_datasets, sentencepiece, grain) is imported when it is used.
"""

from attention_jax.data.batching import Batch, Batches, eval_batches
from attention_jax.data.encoding import EncodedCorpus, encode
from attention_jax.data.pipeline import stream
from attention_jax.data.tasks import TASKS, TranslationData, get_split, load, load_vocabularies
from attention_jax.data.text import Corpus, group_references
from attention_jax.data.vocab import VOCABULARIES, Vocabulary
from attention_jax.tokens import BOS, EOS, PAD, UNK

__all__ = [
  'BOS',
  'EOS',
  'PAD',
  'TASKS',
  'UNK',
  'VOCABULARIES',
  'Batch',
  'Batches',
  'Corpus',
  'EncodedCorpus',
  'TranslationData',
  'Vocabulary',
  'encode',
  'eval_batches',
  'get_split',
  'group_references',
  'load',
  'load_vocabularies',
  'stream',
]
