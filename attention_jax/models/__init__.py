"""Floor 3: encoders, decoders, and the models made of them."""
