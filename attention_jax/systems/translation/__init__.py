"""The translation system: text to text."""
