"""Restores, measured: every policy in every cell of one protocol, beside the lower bound.

`python -m bench restore` runs it on a virtual clock (simulated), on devices played by sleeping
threads (emulated), on torch on a CPU or on CUDA (measured): the same policy objects each time.
"""
