"""Fallback fonts for the pictures of attention_jax: glyphs that matplotlib's DejaVu Sans lacks."""

from pathlib import Path

FOLDER = Path(__file__).parent


def font_paths() -> list[Path]:
  """Returns the font files; the family of a font is the stem of its file name."""
  return sorted(path for path in FOLDER.iterdir() if path.suffix in ('.otf', '.ttf'))
