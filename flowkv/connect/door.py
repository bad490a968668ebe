"""Parts that the doors of all engines share: their versions, frames and transfers."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from flowkv.core.errors import ConfigError
from flowkv.tiers.base import FrameInfo, Outcome, TierAnswer

_log = logging.getLogger("flowkv")

raw_page = partial(FrameInfo, "page", 0, 0)
"""Describe a page in the engine's own form; the arguments are the fields of `FrameInfo` from
`layout` on."""


def untested(engine: str, tested: str, error: ImportError) -> ConfigError:
    """Return the error for an engine that is missing, or has another interface."""
    return ConfigError(
        f"{engine} is missing, or its interface is not the tested one ({error})",
        f"Install {engine} {tested}, or a FlowKV version for yours",
    )


def check_version(engine: str, part: str, version: str, tested: str) -> None:
    """Log a warning if an engine's version is not the tested one."""
    if not version.startswith(f"{tested}."):
        _log.warning("%s %s: FlowKV's %s was tested with %s", engine, version, part, tested)


class Transfer:
    """One job of an engine, a load or a store, with the answers so far.

    Args:
        number: Number of the job.
        keys: The engine's keys of the items.
        loads: Whether the job is a load.

    Attributes:
        left: Number of items without an answer.
        sizes: Bytes of each item that was served, by its position.
        begun_s: Time of the start.
    """

    def __init__(self, number: int, keys: Sequence[Any], *, loads: bool) -> None:
        self.number, self.keys, self.loads = number, list(keys), loads
        self.left, self.sizes = len(self.keys), dict[int, int]()
        self.begun_s = time.monotonic()

    def answered(self, answer: TierAnswer) -> None:
        """Count the answer to an item, and record the bytes of a served one."""
        self.left -= 1
        if answer.outcome in (Outcome.HIT, Outcome.STORED):
            self.sizes[answer.item] = answer.n_bytes
