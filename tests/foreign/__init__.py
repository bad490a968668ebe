"""Runs suites that others wrote with FlowKV attached to every model: `python -m tests.foreign`."""
