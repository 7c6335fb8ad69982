"""One file per task; `get_config(preset)` of each gives a config, and a preset is a paper."""
