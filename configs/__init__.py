"""One config file per task: `get_config(preset)` returns a config; presets are papers and variants of their models."""
