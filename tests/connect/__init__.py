"""Tests of the doors for engines."""
