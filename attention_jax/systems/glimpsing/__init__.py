"""The glimpsing system: pictures to labels, by glimpses or regions."""
