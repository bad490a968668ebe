"""Replays traces of requests through the very policy objects that the runtime uses.

Everything here is simulated and says so (DESIGN D17).
"""
