"""The Triton kernels: every operation on GPUs."""
