"""Measuring protocols, shared by the command line, the demo and `bench/`."""
