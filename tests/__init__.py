"""Tests of the package, in folders with the names of its folders, and of the programs."""
