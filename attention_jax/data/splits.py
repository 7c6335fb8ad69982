"""Names of the splits of a data set."""

SPLITS = ('train', 'validation', 'test', 'unseen')  # 'unseen': data that differ from those of training on purpose
