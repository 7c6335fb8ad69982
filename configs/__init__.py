"""One config file per task. `get_config(preset)` of each returns a config; a preset is a paper."""
