"""The captioning system: pictures to text."""
