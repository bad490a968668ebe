"""Connectors of engines: the keeper that all of them use, and a module for each engine."""

from __future__ import annotations

from flowkv.residency.keeper import Caller, Keeper, open_keeper

__all__ = ["Caller", "Keeper", "open_keeper"]
