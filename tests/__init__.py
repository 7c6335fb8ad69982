"""Tests of everything, with the folders of the package."""
