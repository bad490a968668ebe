"""Restores: the order of computes and loads that bring a prefix back (DESIGN D7)."""

from flowkv.policy.restore.costs import EarlierRates, LoadGate, Measured, lower_bound
from flowkv.policy.restore.policy import (
    RESTORE_POLICIES,
    Compute,
    Costs,
    Op,
    Progress,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Source,
    Span,
    State,
    Suffix,
    make_restore_policy,
)

__all__ = [
    "RESTORE_POLICIES",
    "Compute",
    "Costs",
    "EarlierRates",
    "LoadGate",
    "Measured",
    "Op",
    "Progress",
    "RestoreLoad",
    "RestorePolicy",
    "RestoreRequest",
    "Source",
    "Span",
    "State",
    "Suffix",
    "lower_bound",
    "make_restore_policy",
]
