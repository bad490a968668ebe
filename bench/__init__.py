"""Benchmarks of FlowKV: `python -m bench`, and the modules behind it."""
