"""Identity, residence, pins and fills for drivers without an index of their own."""

from flowkv.residency.ledger import Ledger, Meta, Move, Place, Plan

__all__ = ["Ledger", "Meta", "Move", "Place", "Plan"]
