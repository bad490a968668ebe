"""The `Tier` protocol: a store of frames that may lose them, but never lies and never hangs.

A tier moves *frames* (`tiers.frame`), opaque but checked, named by 32-byte keys. Loads and stores
are submitted in batches and completed later, so that one protocol serves memory, disks and
networks, and maps one to one onto the interfaces of engines (vLLM `submit_store`/`submit_load`/
`get_finished_jobs`, SGLang `batch_get`/`batch_set`/`batch_exists`, LMCache's eventfd tasks). Every
submitted item is answered exactly once, before its deadline: `HIT`, `MISS`, `STORED` or `FAILED`.
After the answer, whatever its outcome, a tier touches neither `target` nor `body` of the item.

Reasons of `FAILED`: full, busy, read-only, deadline, cancelled, closed, invalid, target, memory,
breaker (the engine failed too often and is not called for a while), or the name of an errno such as
ENOSPC. A `MISS` with a reason is a frame that was found but not accepted: layout, fidelity,
stripes, or damage (digest, key, foreign, truncated, version).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from flowkv.core.config import format_size
from flowkv.core.errors import FlowKVError
from flowkv.core.geometry import GRANULE_BYTES

UNBOUNDED = 1 << 62
"""`Tier.capacity_bytes` of a tier of unknown size: only its engine knows the limit."""


Buffer: TypeAlias = bytes | bytearray | memoryview


class BadFrame(FlowKVError, ValueError):
    """Error for bytes that are not the expected frame; a tier turns it into a miss.

    Args:
        reason: One word: "foreign" (no frame of this format), "version", "truncated", "digest",
            "key", "layout", "fidelity", "stripes", "integrity" (another kind of check than the
            reader requires), or "invalid" (the producer described the frame wrongly).
        problem: The problem in one sentence, without a full stop.
    """

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem, "Treat the frame as absent")
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadFrame], tuple[str, str]]:
        return type(self), (self.reason, self.problem)


def aligned(n_bytes: int) -> int:
    """Return `n_bytes` rounded up to the offset where the next stripe begins."""
    return -(-n_bytes // GRANULE_BYTES) * GRANULE_BYTES


class Outcome(Enum):
    """Outcome of one item of a job."""

    HIT = "hit"
    MISS = "miss"
    STORED = "stored"
    FAILED = "failed"


class FrameInfo(NamedTuple):
    """Description of a frame, without the digests, which are computed from the body.

    Attributes:
        kind: "page", "state", "weights" or "memo".
        codec: Codec index of the body (`core.geometry.FIDELITIES`).
        fidelity: Highest codec index among the frame and its ancestors: 0 only if all are raw.
        layout: 16-byte layout fingerprint.
        parent: Key of the parent page; 32 zero bytes for a root.
        namespace: `Namespace.digest()`.
        group: Layer group.
        tokens: Number of tokens (the page size, or fewer for a state).
        stripe_bytes: Bytes per stripe; the body is a whole number of stripes. A multiple of 4096 if
            there are several stripes.
        tenant: `tenant_salt(...)`, 32 bytes, so that a tenant can be forgotten on every tier.
        rank: Tensor-parallel rank.
        world: Number of ranks.
        head_start: First KV head in the body.
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
    """Request to read one frame, or some of its stripes.

    Attributes:
        key: 32 bytes.
        target: Writable memory, at least as long as the requested stripes; its content is undefined
            unless the outcome is `HIT`.
        layout: `PageLayout.fingerprint()` (or a blob's own 16 bytes) that the frame must carry;
            another layout is a miss.
        fidelity: Highest (lossiest) codec index in the frame's ancestry that the reader accepts; a
            frame above it is a miss (DESIGN D6).
        first: First requested stripe; written from the first byte of `target` on.
        stripes: Number of stripes; 0 for all from `first` on. Stripes beyond the frame are a miss
            with reason "stripes". Only the requested stripes are verified.
        unread: Whether the caller verifies them where they go: a tier may leave a target unread
            that is its own memory, or a `direct` one, and answer with the digests that the stripes
            must have.
        direct: Whether nothing uses the memory of the target again while anything refers to it,
            also behind a `FAILED`: a tier may read from a disk straight into it, late too.
    """

    key: bytes
    target: memoryview
    layout: bytes
    fidelity: int = 0
    first: int = 0
    stripes: int = 0
    unread: bool = False
    direct: bool = False


class Store(NamedTuple):
    """Request to write one frame.

    Attributes:
        key: 32 bytes.
        info: Description of the frame, written into its header.
        body: Readable memory with the stripes; must stay unchanged until the item is answered.
        digests: NH-128 of each stripe, 16 bytes in order, made where the body came from; as the
            body, it must stay unchanged. A tier may take them for its own, and write the body from
            where it lies: that memory must not be used again while anything refers to it, also
            behind a `FAILED`. None if unknown.
    """

    key: bytes
    info: FrameInfo
    body: memoryview
    digests: bytes | memoryview | None = None


class TierAnswer(NamedTuple):
    """Answer to one item of a job.

    Attributes:
        job: Number that `submit_*` returned.
        item: Index of the item within the job.
        key: The item's key.
        outcome: Outcome of the item.
        reason: Cause of a `FAILED`, or of the refusal of a stored frame as a `MISS`; "" otherwise.
        info: Description from the frame's header, on a `HIT`.
        n_bytes: Bytes moved; for a `HIT` the bytes written to `target`.
        seconds: From submission to completion.
        digests: NH-128 of each stripe, for the caller to verify; empty for verified ones.
    """

    job: int
    item: int
    key: bytes
    outcome: Outcome
    reason: str = ""
    info: FrameInfo | None = None
    n_bytes: int = 0
    seconds: float = 0.0
    digests: bytes = b""


Completion = TierAnswer
"""Former name of `TierAnswer`, kept for third-party tiers."""


class Entry(NamedTuple):
    """One frame in a tier, as `scan` reports it.

    Attributes:
        key: 32 bytes.
        info: Description of the frame.
        n_bytes: Bytes that the frame occupies in the tier.
    """

    key: bytes
    info: FrameInfo
    n_bytes: int


@runtime_checkable
class Tier(Protocol):
    """Store of frames. All methods are thread-safe; none raises for a missing frame.

    Attributes:
        name: Shown in statistics; unique within a stack.
        kind: "host", "disk" or "remote".
        capacity_bytes: Most bytes it may occupy, everything included; `UNBOUNDED` where only its
            engine knows.
        writable: False where another process owns the tier: stores are then answered `FAILED`. May
            change.
        shared: Whether other processes may write to the tier, so that frames come and go unasked.
            May change.
    """

    name: str
    kind: str
    capacity_bytes: int

    @property
    def writable(self) -> bool:
        """Return False where another process owns the tier."""

    @property
    def shared(self) -> bool:
        """Return whether other processes may write to the tier."""

    def used_bytes(self) -> int:
        """Return the bytes occupied now, overhead included."""

    def frame_bytes(self, body_bytes: int) -> int:
        """Return the bytes that a frame with such a body occupies here; callers make room by it."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a frame is expected; a load may still miss.

        Local tiers answer at once. Remote tiers may ask their engine, for as long as a look-up
        takes and 50 ms at most; keys without a reply by then are False.
        """

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        """Start reading; return a job number. Only verified bytes are reported as `HIT`."""

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        """Start writing; `STORED` means that a reader, or a restart after kill -9, finds the frame.

        A frame that does not fit into `capacity_bytes` is `FAILED` with reason "full": making room
        is the task of the caller, by policy. A key that is present is `STORED` at once, its frame
        unchanged.
        """

    def poll(self, timeout_s: float = 0.0) -> list[TierAnswer]:
        """Return the answers that are ready; wait up to `timeout_s` for the first one."""

    def cancel(self, job: int) -> None:
        """Answer the unanswered items of a job `FAILED` "cancelled", where that is possible.

        An item with its target or body in use right now is answered as without the cancellation.
        """

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget frames at once; return how many were present. Loads in flight may still answer."""

    def erase(self, keys: Sequence[bytes]) -> int:
        """Delete frames and leave no copy of their bytes: overwritten, or removed by the engine.

        Raises:
            StoreError: Some may still be there; the message names the tier and the cause.
        """

    def scan(self) -> Iterator[Entry]:
        """Yield all frames, oldest store first. Used to rebuild the index at start."""

    def close(self) -> None:
        """Finish or fail the items in flight, keep persistent frames, release everything else."""


class OverTier:
    """Base of a tier over another one; frames and room are those of the other.

    Attributes:
        inner: The other tier.
    """

    inner: Tier

    @property
    def writable(self) -> bool:
        """Return False where another process owns the tier."""
        return self.inner.writable

    @property
    def shared(self) -> bool:
        """Return whether other processes may write to the tier."""
        return self.inner.shared

    def used_bytes(self) -> int:
        """Return the bytes occupied now, overhead included."""
        return self.inner.used_bytes()

    def frame_bytes(self, body_bytes: int) -> int:
        """Return the most bytes that a frame with such a body occupies here."""
        return self.inner.frame_bytes(body_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a frame is expected."""
        return self.inner.contains(keys)


MOST_LISTED = 1 << 16
"""Frames of a remote tier that are listed at start; others are found on demand."""


BASIS_LAYOUT = hashlib.sha256(b"flowkv.kvt basis/1").digest()[:16]
CURRENT_LAYOUT = hashlib.sha256(b"flowkv.kvt current/1").digest()[:16]
"""Layouts of the bases of coded pages (`flowkv.kvt`), and of the record of those in use."""


def bases_in(tier: Tier, covers: Callable[[bytes, bytes], bool]) -> Iterator[bytes]:
    """Yield the keys of bases, and of their records, where `covers(tenant, namespace)` says so."""
    for key, info, _ in tier.scan():
        if info.layout in (BASIS_LAYOUT, CURRENT_LAYOUT) and covers(info.tenant, info.namespace):
            yield key


def evictable(tier: Tier) -> Iterator[Entry]:
    """Yield a tier's frames, oldest store first, without the bases that coded pages need."""
    in_use: Callable[[bytes], bool] = getattr(tier, "in_use", lambda _: True)
    for entry in tier.scan():
        basis = entry.info.layout in (BASIS_LAYOUT, CURRENT_LAYOUT)
        if not (basis and in_use(entry.info.namespace)):
            yield entry


def listed(tier: Tier) -> list[Entry]:
    """Return a tier's evictable frames, oldest store first, as far as they are listed."""
    return [*islice(evictable(tier), MOST_LISTED if tier.kind == "remote" else None)]


# Optional attributes of tiers, beyond the protocol.


def reserved_bytes(tier: Tier) -> int:
    """Return the part of `used_bytes` that is reserved for managing frames and holds none."""
    return int(getattr(tier, "reserved_bytes", 0))


def no_room(tier: Tier, body_bytes: int) -> str:
    """Return the reason why even an empty tier cannot store a frame with such a body, or ""."""
    need, size = tier.frame_bytes(body_bytes), tier.capacity_bytes - reserved_bytes(tier)
    if need > size:
        return f"a frame takes {format_size(need)} of the {format_size(max(size, 0))} for frames"
    own = getattr(tier, "no_room", None)
    return str(own(need)) if own is not None else ""
