"""Runs the programs of lab/ as their command lines would."""

from functools import partial

from tests.experiments import helpers

run = partial(helpers.run, package='lab')
