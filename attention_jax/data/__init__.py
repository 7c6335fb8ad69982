"""Data on the host, with numpy and grain: reading, vocabularies, batches. Contains no model code.

Every kind of task has readers (a table that `config.data.task` selects from) and batches that are functions of
(seed, step):

- pairs of texts: tasks, translation_sets, pairs, text, prepared, preparing, pair_streams; vocab, word_positions,
  incremental; encoding; batching;
- documents with labels: documents, sentences; document_batches;
- images with captions: pictures, images, features;
- images with labels: digits;
- generated bit vectors: recall_tasks, recall.

builders generates data sets. files, urls, url_folders, splits, tfds_sets, hugging_face and pipeline serve several
tasks. The packages tensorflow_datasets, sentencepiece, tokenizers, pyarrow, spacy and grain are imported when they are
used.
"""
