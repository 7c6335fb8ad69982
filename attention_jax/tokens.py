"""Special tokens: their ids are the same in every vocabulary, and the data, models and losses all use them."""

PAD, BOS, EOS, UNK = range(4)
SPECIAL_TOKENS = ('<pad>', '<s>', '</s>', '<unk>')
