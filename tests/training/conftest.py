"""Whole runs of a toy, again and again: what they compile is kept."""

from tests.compiled import compiled_once  # noqa: F401 - a fixture
