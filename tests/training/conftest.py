"""Shares compiled programs between the tests of this folder, which train the same toy model repeatedly."""

from tests.compiled import compilation_cache_folder, shared_compilation_cache  # noqa: F401 - fixtures
