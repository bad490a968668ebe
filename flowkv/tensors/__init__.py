"""Tensors other than K and V, from tiers and files: weights, embedding rows, encoder results."""
