"""Doors for engines."""
