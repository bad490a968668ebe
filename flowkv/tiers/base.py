"""The `Tier` protocol: a place for frames that may lose them, never lies, never blocks for ever.

A tier moves *frames* (`tiers.frame`), opaque but checked, named by 32-byte keys. Loads and stores
are submitted in batches and completed later, so that one protocol serves memory, disks and
networks, and maps one to one onto what engines ask of a tier (vLLM `submit_store`/`submit_load`/
`get_finished_jobs`, SGLang `batch_get`/`batch_set`/`batch_exists`, LMCache's eventfd tasks). Every
submitted item is answered exactly once, before its deadline: `HIT`, `MISS`, `STORED` or `FAILED`.
After its answer, whatever it is, a tier touches neither the `target` nor the `body` of an item.

Reasons of `FAILED`: full, busy, read-only, deadline, cancelled, closed, invalid, target, memory,
breaker (its engine failed too often and is left alone for a while), or the name of an errno such as
ENOSPC. A `MISS` with a reason was found but not accepted: layout, fidelity, stripes, or damage
(digest, key, foreign, truncated, version).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from flowkv.core.config import format_size

UNBOUNDED = 1 << 62
"""`Tier.capacity_bytes` of a place whose size only its engine knows."""


class Outcome(Enum):
    """The end of one item of a job."""

    HIT = "hit"
    MISS = "miss"
    STORED = "stored"
    FAILED = "failed"


class FrameInfo(NamedTuple):
    """The description of a frame (the digests are computed from the body).

    Attributes:
        kind: "page", "state", "weights" or "memo".
        codec: Codec index of the body (`core.geometry.CODECS`).
        fidelity: Highest codec index among the frame and its ancestors: 0 only if all are raw.
        layout: 16-byte layout fingerprint.
        parent: Key of the parent page; 32 zero bytes for a root.
        namespace: `Namespace.digest()`.
        group: Layer group.
        tokens: Tokens held (page size, or fewer for a state).
        stripe_bytes: Bytes per stripe; the body is a whole number of stripes. A multiple of 4096
            where there are several.
        tenant: `tenant_salt(...)`, 32 bytes, so that a tenant can be forgotten on every tier.
        rank: Tensor-parallel rank.
        world: Number of ranks.
        head_start: First KV head held.
        head_stop: One past the last; 0 means all.
    """

    kind: str
    codec: int
    fidelity: int
    layout: bytes
    parent: bytes
    namespace: bytes
    group: int
    tokens: int
    stripe_bytes: int
    tenant: bytes = bytes(32)
    rank: int = 0
    world: int = 1
    head_start: int = 0
    head_stop: int = 0


class Load(NamedTuple):
    """Wish to read one frame, or some of its stripes.

    Attributes:
        key: 32 bytes.
        target: Writable memory for the stripes wished for, at least as long as they are; its
            content is undefined unless the outcome is `HIT`.
        layout: `PageLayout.fingerprint()` (or a blob's own 16 bytes) that the frame must carry;
            another layout is a miss.
        fidelity: Highest (lossiest) codec index in the frame's ancestry that the reader accepts; a
            frame above it is a miss (DESIGN D6).
        first: First stripe wished for; it begins at the first byte of `target`.
        stripes: Number of stripes; 0 for all from `first` on. Stripes that the frame does not have
            are a miss with reason "stripes". Only what was wished for is verified.
    """

    key: bytes
    target: memoryview
    layout: bytes
    fidelity: int = 0
    first: int = 0
    stripes: int = 0


class Store(NamedTuple):
    """Wish to write one frame.

    Attributes:
        key: 32 bytes.
        info: What the frame says about itself.
        body: Readable memory with the stripes; must stay unchanged until the item is answered.
    """

    key: bytes
    info: FrameInfo
    body: memoryview


class TierAnswer(NamedTuple):
    """The answer to one item.

    Attributes:
        job: Number that `submit_*` returned.
        item: Index of the item within the job.
        key: The item's key.
        outcome: How it ended.
        reason: Why it `FAILED`, or why a stored frame was refused as a `MISS`; "" otherwise.
        info: The frame's own description, on a `HIT`.
        n_bytes: Bytes moved; of a `HIT` those in `target`.
        seconds: From submission to completion.
    """

    job: int
    item: int
    key: bytes
    outcome: Outcome
    reason: str = ""
    info: FrameInfo | None = None
    n_bytes: int = 0
    seconds: float = 0.0


Completion = TierAnswer
"""Its name of before, which tiers of other people may use."""


class Entry(NamedTuple):
    """One frame that a tier holds, as `scan` reports it.

    Attributes:
        key: 32 bytes.
        info: What the frame says about itself.
        n_bytes: Bytes it occupies in the tier.
    """

    key: bytes
    info: FrameInfo
    n_bytes: int


@runtime_checkable
class Tier(Protocol):
    """A place for frames. All methods are thread-safe; none raises for a frame that is not there.

    Attributes:
        name: Shown in statistics; unique within a stack.
        kind: "host", "disk" or "remote".
        capacity_bytes: Most bytes it may occupy, everything included; `UNBOUNDED` where only its
            engine knows.
        writable: False where another process owns it: stores then answer `FAILED`. May change.
        shared: Whether others may write to it too, so that frames come and go unasked. May change.
    """

    name: str
    kind: str
    capacity_bytes: int

    @property
    def writable(self) -> bool:
        """False where another process owns it."""
        ...

    @property
    def shared(self) -> bool:
        """Whether others may write to it."""
        ...

    def used_bytes(self) -> int:
        """Bytes occupied now, overhead included."""
        ...

    def frame_bytes(self, body_bytes: int) -> int:
        """Bytes that a frame with such a body occupies here; the store makes room with it."""
        ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys are believed to be there; a load may still miss.

        Local tiers answer at once. Remote ones may ask, for as long as a look-up takes and 50 ms at
        most; what is not known by then is False.
        """
        ...

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Starts reading; returns a job number. Verified bytes only are reported as `HIT`."""
        ...

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Starts writing; `STORED` means a reader, or a restart after kill -9, will find it.

        A frame that does not fit into `capacity_bytes` is `FAILED` with reason "full": making room
        is the store's task, by policy. A key already there is `STORED` at once, unchanged.
        """
        ...

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Answers that are ready; waits up to `timeout_s` for the first one."""
        ...

    def cancel(self, job: int) -> None:
        """Answers what is not answered yet of a job `FAILED` "cancelled", where that is possible.

        An item whose target or body is in use right now is answered as it would have been.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forgets frames at once; returns how many were there. Loads in flight may still answer."""
        ...

    def erase(self, keys: Sequence[bytes]) -> int:
        """Like `delete`, and leaves no copy of their bytes: overwritten, or removed by the engine.

        Raises:
            StoreError: Some may still be there; the message says which tier and why.
        """
        ...

    def scan(self) -> Iterator[Entry]:
        """All frames, oldest store first. Used to rebuild the index at start."""
        ...

    def close(self) -> None:
        """Finishes or fails what is in flight, keeps what persists, releases everything."""
        ...


# What tiers may say beside the protocol.


def reserved_bytes(tier: Tier) -> int:
    """Return the part of `used_bytes` that no frame takes: kept free for managing frames."""
    return int(getattr(tier, "reserved_bytes", 0))


def no_room(tier: Tier, body_bytes: int) -> str:
    """Return why a tier can store no frame with such a body, however few it holds; "" if it can."""
    need, size = tier.frame_bytes(body_bytes), tier.capacity_bytes - reserved_bytes(tier)
    if need > size:
        return f"a frame takes {format_size(need)} of the {format_size(max(size, 0))} for frames"
    own = getattr(tier, "no_room", None)
    return str(own(need)) if own is not None else ""
