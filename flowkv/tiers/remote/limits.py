"""How much a remote tier may do, and how long it may take."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
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
