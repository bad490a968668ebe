"""Restores: what is computed, what is loaded, and in which order (DESIGN D7)."""

from flowkv.policy.restore.base import RestorePolicy
from flowkv.policy.restore.bounds import lower_bound
from flowkv.policy.restore.catalogue import RESTORE_POLICIES, make_restore_policy
from flowkv.policy.restore.costs import Measured
from flowkv.policy.restore.gate import LoadGate
from flowkv.policy.restore.state import Costs, Progress, State
from flowkv.policy.restore.verify import Caps, VerificationError, verify
from flowkv.policy.restore.words import Compute, Load, Op, Request, Source, Span, Suffix

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
