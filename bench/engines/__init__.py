"""FlowKV inside real engines: `python -m bench engines`."""
