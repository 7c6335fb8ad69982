"""The ids that every vocabulary shares: data writes them, models and losses know them."""

PAD, BOS, EOS, UNK = range(4)
SPECIAL_TOKENS = ('<pad>', '<s>', '</s>', '<unk>')
