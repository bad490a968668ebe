"""Continuous batching over any model with a FlowKV cache: a library, never a server."""
