"""Studies of many runs: the paper's protocols (`protocol.py`), and studies written as TOML files (`definition.py`)."""
