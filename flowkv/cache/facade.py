"""`Cache`: what rooms below `KV` may ask of the cache that they work for."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any, Protocol

from flowkv.cache.block_table import Planner
from flowkv.cache.guard import Guard
from flowkv.cache.match import PrefixMatcher
from flowkv.cache.requests import Queue, RequestTracker
from flowkv.cache.sequence import Sequence
from flowkv.cache.step import Step
from flowkv.core.config import Config
from flowkv.core.keys import Salt
from flowkv.observe.metrics import Metrics
from flowkv.observe.timeline import Tenancy


class Cache(Protocol):
    """The part of `KV` that audits, hand-overs and statistics use; see there."""

    config: Config
    lock: Guard
    closed: bool
    metrics: Metrics
    tenants: Tenancy
    planner: Planner | None
    restorer: PrefixMatcher
    visits: RequestTracker
    queue: Queue
    tokens_seen: int
    tokens_reused: int
    seen_most: int
    reused_most: int
    _open: dict[int, Sequence]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child, whose parent has the tiers."""
        ...

    def warn(self, code: str, message: str) -> None:
        """Warns, once for each code."""
        ...

    def step(self, seqs: Items[Sequence], new_tokens: Items[Any]) -> Step:
        """A step over sequences and their new tokens."""
        ...

    def prefill(self, seqs: Items[Sequence], *, chunk: int = 512) -> Iterator[Step]:
        """Steps until all tokens of the sequences are computed."""
        ...

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until all that is to be stored is."""
        ...

    def _bound(self) -> Planner: ...

    def _may_publish(self, seq: Sequence) -> bool: ...

    def _sequence(self, planner: Planner, tenant: str | None, salts: Items[Salt]) -> Sequence: ...
