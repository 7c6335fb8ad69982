"""Data on the host, with numpy and grain: reading, vocabularies, batches. Contains no model code.

Every kind of task has readers (a table that `config.data.task` selects from) and batches that are functions of
(seed, step):

- pairs of texts: tasks, translation_sets, text, prepared; vocab, subword_sampling, incremental; encoding; batching,
  resegment;
- documents with labels: documents, sentences; document_batches;
- images with captions: pictures, images, features;
- images with labels: digits;
- generated bit vectors: recall.

builders generates data sets. files, urls, splits, tfds_sets and pipeline serve several tasks. Packages that only
some tasks need (tensorflow_datasets, sentencepiece, spacy, grain) are imported when they are used.
"""
