"""Restores: what is computed, what is loaded, and in which order (DESIGN D7)."""

from flowkv.policy.restore.catalogue import RESTORE_POLICIES, make_restore_policy
from flowkv.policy.restore.costs import LoadGate, Measured, lower_bound
from flowkv.policy.restore.state import (
    Caps,
    Compute,
    Costs,
    Load,
    Op,
    Progress,
    Request,
    RestorePolicy,
    Source,
    Span,
    State,
    Suffix,
    VerificationError,
    verify,
)

__all__ = [
    "RESTORE_POLICIES",
    "Caps",
    "Compute",
    "Costs",
    "Load",
    "LoadGate",
    "Measured",
    "Op",
    "Progress",
    "Request",
    "RestorePolicy",
    "Source",
    "Span",
    "State",
    "Suffix",
    "VerificationError",
    "lower_bound",
    "make_restore_policy",
    "verify",
]
