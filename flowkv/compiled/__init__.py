"""Machine code by numba: made in other processes, kept for later ones, and left out of times."""
