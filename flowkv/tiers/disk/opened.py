"""Frames that a disk has delivered: verified and copied to their targets, whole batches at a time.

Small batches are checked by the envelope. Large ones of plain frames go through one compiled call
(`tiers.check`), which keeps its speed while the interpreter is busy elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowkv.tiers.base import Load
from flowkv.tiers.disk.flight import Reading
from flowkv.tiers.disk.records import Held
from flowkv.tiers.disk.recover import agree
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.frame import DIGEST_BYTES, XXH3_128, BadFrame, Header, fixed_fields
from flowkv.tiers.io.staging import address_of

COMPILED_BYTES = 1 << 20
"""Batches at least so large are worth the compiled check, and once in a process its loading."""


def open_all(envelope: Envelope, flights: Sequence[Reading]) -> list[str]:
    """Verifies what was read and puts it into the targets; "" or the reason of each `BadFrame`."""
    found: dict[int, str] = {}
    if envelope.integrity == "xxh3":
        plain = [n for n, flight in enumerate(flights) if _is_plain(flight.held)]
        wanted = (flights[n].count * flights[n].held.info.stripe_bytes for n in plain)
        if sum(wanted) >= COMPILED_BYTES:
            reasons = _open_compiled([flights[n] for n in plain])
            found = dict(zip(plain, reasons, strict=True))
    return [
        found[n] if n in found else open_one(envelope, flight) for n, flight in enumerate(flights)
    ]


def _is_plain(held: Held) -> bool:
    return held.integrity == XXH3_128 and not held.lossless


def open_one(envelope: Envelope, flight: Reading) -> str:
    """The same for one of any kind."""
    try:
        header = flight.header or read_header(envelope, flight)
        target = target_of(flight)
        stored: memoryview = target if flight.direct is not None else _stored(flight)
        envelope.open(header, stored, target, flight.first, flight.count)
    except BadFrame as error:
        return error.reason
    return ""


def read_header(envelope: Envelope, flight: Reading) -> Header:
    """The header that was read, checked, and found to be the one wished for.

    Raises:
        BadFrame: It is another one, or damaged.
    """
    assert flight.memory is not None
    held = flight.held
    data = flight.memory.view[: held.header_bytes]
    return agree(envelope.head(data, flight.item.key, generation=held.seq), held)


def target_of(flight: Reading) -> memoryview:
    """Where the stripes are wished for."""
    if flight.direct is not None:
        return flight.direct
    wish = flight.item.wish
    assert isinstance(wish, Load)
    return wish.target.cast("B")


def _stored(flight: Reading) -> memoryview:
    assert flight.memory is not None
    return flight.memory.view[flight.body_at :]


def _open_compiled(flights: Sequence[Reading]) -> list[str]:
    from flowkv.tiers.check import CHECK, REASONS, check_frames

    rows, fields, targets = [], [], []
    for flight in flights:
        held, memory = flight.held, flight.memory
        assert memory is not None
        target = target_of(flight)
        targets.append(target)  # alive until all is copied
        step = held.info.stripe_bytes
        to = address_of(target)
        start = to if flight.direct is not None else memory.address + flight.body_at
        rows.append(
            (
                *(memory.address, held.header_bytes, start, flight.count * step, to, step),
                *(held.stripes, flight.first, flight.count),
            )
        )
        expected = Header(flight.item.key, held.info, bytes(DIGEST_BYTES * held.stripes), held.seq)
        fields.append(fixed_fields(expected))
    checks = np.array(rows, CHECK)
    reasons = check_frames(checks, np.frombuffer(b"".join(fields), np.uint8).reshape(-1, 256))
    return [REASONS[reason] for reason in reasons.tolist()]
