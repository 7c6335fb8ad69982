"""The recall system: sequences of vectors to bits, with an external memory."""
