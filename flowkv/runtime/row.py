"""Rows of an engine that are sequences and nothing else, however the model is run over them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from flowkv.core.keys import Salt
from flowkv.policy.config import Lease
from flowkv.runtime.cache import KV
from flowkv.runtime.opening import Tokens
from flowkv.runtime.retention import Retain
from flowkv.runtime.sequence import Sequence


class Asked(Protocol):
    """What a request says about its row, see `KV.open`."""

    @property
    def tenant(self) -> str | None:
        """Whose pages may be used and made."""
        ...

    @property
    def salts(self) -> Items[Salt]:
        """What K and V depend on beside the tokens."""
        ...

    @property
    def session(self) -> str | int | None:
        """Its conversation."""
        ...

    @property
    def lease(self) -> str | Lease:
        """How long its pages stay."""
        ...

    @property
    def retain(self) -> Items[Retain]:
        """Spans of tokens that are kept more, or less, than others."""
        ...


class PagedRow:
    """A row that is a sequence and nothing else, see `engine.runner.Row`.

    Args:
        kv: Where its pages are.
        seq: Its sequence.
    """

    def __init__(self, kv: KV, seq: Sequence) -> None:
        self._kv, self.seq = kv, seq

    def suspend(self) -> int:
        """See `KV.suspend`."""
        return self._kv.suspend(self.seq)

    def resume(self) -> None:
        """See `KV.resume`."""
        self._kv.resume(self.seq)

    def close(self, stop: str = "") -> None:
        """See `Sequence.close`."""
        self.seq.close(stop)


def open_row(kv: KV, request: Asked, tokens: Tokens, *, wait: bool) -> PagedRow:
    """Opens a row for a request.

    Args:
        kv: The cache.
        request: Whose row.
        tokens: Its prompt, and what was made of it so far.
        wait: See `KV.open`.

    Raises:
        CapacityError: Too many sequences are open.
    """
    seq = kv.open(
        tokens,
        tenant=request.tenant,
        salts=request.salts,
        session=request.session,
        lease=request.lease,
        retain=request.retain,
        wait=wait,
    )
    return PagedRow(kv, seq)
