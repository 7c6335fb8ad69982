"""Floor 3: encoders x decoders, and search over them."""
