"""The numba twins: every operation on CPUs, compiled once and kept on disk."""
