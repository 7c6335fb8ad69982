"""Whole runs of a toy, again and again: what they compile is kept."""

from tests.compiled import shared_compilation_cache  # noqa: F401 - a fixture
