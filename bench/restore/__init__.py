"""Restores on a virtual clock (simulated): every policy in every cell, beside the lower bound."""
