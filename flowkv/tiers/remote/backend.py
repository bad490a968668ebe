"""The `Backend` protocol: what an engine must be able to do, as plainly as possible.

Objects have names (64 hex digits, made from keys and from nothing else) and are written whole. All
calls block, and may be made from several threads at once. Each gets the seconds that it may take;
one that takes longer is abandoned by its tier, which gives its memory to nobody until it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypedDict

from flowkv.core.clock import Clock
from flowkv.tiers.envelope import Envelope


class Listed(NamedTuple):
    """One object of a listing.

    Attributes:
        name: Its name.
        n_bytes: Its length.
        stored_ns: When it was written, in nanoseconds since 1970; 0 where unknown.
    """

    name: str
    n_bytes: int
    stored_ns: int = 0


class Backend(Protocol):
    """An engine, seen as a place for named byte strings.

    Everything that goes wrong is an `OSError`: `TimeoutError` when the time was over,
    `PermissionError` when the engine refuses and will refuse again (never retried), one with
    `errno.ENOSPC` when it is full, `ConnectionError` or any other when it may work another time.

    Attributes:
        name: Shown in statistics and errors, with the address and without secrets.
        asks: Most names that `exists` looks up quickly (some milliseconds) in one call; 0 where a
            look-up costs a request per name, so that only what is listed counts as known.
    """

    name: str
    asks: int

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> memoryview | None:
        """Reads from `offset` on as many bytes as `into` holds, or the object has.

        Returns:
            The beginning of `into`; or, from a client that receives into memory of its own, such
            memory, the caller's alone from now on. None if there is no such object.
        """
        ...

    def put(self, name: str, data: memoryview, timeout_s: float) -> None:
        """Writes an object whole, replacing what was there; readers see all of it or nothing."""
        ...

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """Removes objects; names that are not there are no error."""
        ...

    def exists(self, names: Sequence[str], timeout_s: float) -> list[bool]:
        """Which objects are there, by the engine's own word."""
        ...

    def list(self, timeout_s: float) -> Iterator[Listed]:
        """All objects, in any order; `timeout_s` is for each request, of which there may be many.

        Names that are not 64 hex digits are not the tier's, and are left out.
        """
        ...

    def close(self) -> None:
        """Gives up connections; called once, when no call is under way."""
        ...


# How much a remote tier may do, and how long it may take.


class RemoteLimits(NamedTuple):
    """How much a remote tier may do, and how long it may take.

    Attributes:
        threads: Calls to the engine at a time.
        queue_bytes: Stores waiting beyond this many bytes are `FAILED` with reason "busy".
        spares: Most threads that are replaced while they hang.
        retired_bytes: Memory in the hands of hanging calls beyond which none is begun.
        call_s: Seconds for one request that has no deadline of its own: a page of a listing, a
            batch of deletions.
        open_s: How long opening waits for the first listing; what is listed later is learnt later.
        close_s: How long closing waits for stores that are under way.
        erase_s: How long `erase` tries; for a thousand frames twice as long, and so on.
        pause_s: How long an engine that failed three times is left alone at first.
        every_s: Seconds between two looks at what others wrote, where the engine makes that cheap.
    """

    threads: int = 8
    queue_bytes: int = 1 << 28
    spares: int = 16
    retired_bytes: int = 1 << 28
    call_s: float = 5.0
    open_s: float = 5.0
    close_s: float = 10.0
    erase_s: float = 30.0
    pause_s: float = 0.5
    every_s: float = 15.0


class RemoteOptions(TypedDict, total=False):
    """What all remote tiers can be told besides address and capacity; see `RemoteTier`."""

    name: str
    envelope: Envelope | None
    clock: Clock | None
    limits: RemoteLimits | None
