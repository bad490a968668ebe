"""The page kernels on one GPU, checked and timed in one call: `python -m bench.gpu`."""
