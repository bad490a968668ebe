"""The `Backend` protocol: what an engine must be able to do, as plainly as possible.

Objects have names (64 hex digits, made from keys and from nothing else) and are written whole. All
calls block, and may be made from several threads at once. Each gets the seconds that it may take;
one that takes longer is abandoned by its tier, which gives its memory to nobody until it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

ABSENT = -1
"""What `Backend.get` returns for a name that is not there."""


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

    def get(self, name: str, offset: int, into: memoryview, timeout_s: float) -> int:
        """Reads from `offset` on into memory, to its end or the object's.

        Returns:
            The number of bytes read; `ABSENT` if there is no such object.
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


@runtime_checkable
class Lender(Protocol):
    """What a backend offers besides whose client receives into memory of its own anyway."""

    @property
    def lends(self) -> int:
        """Reads of fewer bytes are lent."""
        ...

    def lend(self, name: str, offset: int, n_bytes: int, timeout_s: float) -> memoryview | None:
        """Like `Backend.get`, but in memory that is the caller's alone; None if absent."""
        ...
