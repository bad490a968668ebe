"""The frame: a page, or another blob, as it lies below the device. One format in every tier.

    frame  = header | body                 header: whole 4 KiB pages, nearly always one
    body   = stripe 0 | stripe 1 | ...     as many as `FrameInfo.stripe_bytes` says
    header = fixed part (256 bytes) | one 16-byte xxh3_128 digest per stripe | zeros

The header carries a digest over all its own bytes, padding included, so that no bit of a frame can
change unseen. A header is a pure function of key, info and body: the same frame has the same bytes
in memory, on a disk and on the wire. Nothing read from a header is used before its digest is right,
and no length before it was checked against the bytes that are there (DESIGN D5, D11).

xxh3_128 finds accidents, not attackers: the byte `integrity` names the check, and frames of a keyed
(AEAD) one will be refused by a reader that does not know it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from flowkv.core.errors import FlowKVError
from flowkv.core.keys import KEY_BYTES
from flowkv.core.layout import CODECS, GRANULE_BYTES
from flowkv.tiers.base import FrameInfo

MAGIC = b"FKVFRAME"
VERSION = 1
KINDS = ("page", "state", "weights", "memo")
DIGEST_BYTES = 16
LAYOUT_BYTES = 16
MAX_STRIPES = 1 << 16
XXH3_128 = 0

# magic, version, header pages, header digest | kind, codec, fidelity, integrity | key, parent,
# namespace, tenant, layout | group, tokens, rank, world, head start, head stop, stripes | its bytes
_FIXED = struct.Struct("<8sHH4x16s 4B4x 32s32s32s32s16s 7I4x Q")
_FIXED_BYTES = 256
_FIRST = (GRANULE_BYTES - _FIXED_BYTES) // DIGEST_BYTES
_NEXT = GRANULE_BYTES // DIGEST_BYTES
_DIGEST_AT = slice(16, 32)
_U32 = 1 << 32


class BadFrame(FlowKVError, ValueError):
    """Bytes that are not the frame they should be; a tier turns it into a miss.

    Args:
        reason: One word: "foreign" (no frame of ours), "version", "truncated", "digest", "key",
            "layout", "fidelity", "stripes", or "invalid" (the producer described it wrongly).
        problem: What is wrong, one sentence without a full stop.
    """

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem, "Treat the frame as absent")
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadFrame], tuple[str, str]]:
        return type(self), (self.reason, self.problem)


class Header(NamedTuple):
    """What a checked header says.

    Attributes:
        key: 32 bytes.
        info: The frame's description.
        digests: 16 bytes per stripe, in order.
    """

    key: bytes
    info: FrameInfo
    digests: bytes

    @property
    def stripes(self) -> int:
        """Stripes of the body."""
        return len(self.digests) // DIGEST_BYTES

    @property
    def body_bytes(self) -> int:
        """Length of the body."""
        return self.stripes * self.info.stripe_bytes


def header_bytes(stripes: int) -> int:
    """Bytes of the header of a frame with so many stripes."""
    beyond = max(0, stripes - _FIRST)
    return GRANULE_BYTES * (1 + -(-beyond // _NEXT))


def most_header_bytes(body_bytes: int) -> int:
    """Upper bound of the header's bytes, for those who know only how long the body is."""
    return header_bytes(min(MAX_STRIPES, max(1, -(-body_bytes // GRANULE_BYTES))))


def count_stripes(key: bytes, info: FrameInfo, body_bytes: int) -> int:
    """Stripes of a body of that length, once everything about the frame is found sound.

    Raises:
        BadFrame: "invalid": a field is out of range, or body and stripes do not fit.
    """
    counts = (info.group, info.tokens, info.rank, info.world, info.head_start, info.head_stop)
    names = key, info.parent, info.namespace, info.tenant
    if any(len(name) != KEY_BYTES for name in names) or len(info.layout) != LAYOUT_BYTES:
        raise BadFrame("invalid", "a name has not 32 bytes, or a layout fingerprint not 16")
    if info.kind not in KINDS:
        raise BadFrame("invalid", f"kind {info.kind!r} is none of {', '.join(KINDS)}")
    if not 0 <= info.codec <= info.fidelity < len(CODECS):
        raise BadFrame("invalid", f"codec {info.codec} with fidelity {info.fidelity}")
    if min(counts) < 0 or max(counts) >= _U32 or info.rank >= info.world:
        raise BadFrame("invalid", f"group, tokens, rank, world or heads are {counts}")
    if info.stripe_bytes < 1 or body_bytes < 1 or body_bytes % info.stripe_bytes:
        raise BadFrame("invalid", f"{body_bytes} bytes in stripes of {info.stripe_bytes}")
    stripes = body_bytes // info.stripe_bytes
    if stripes > MAX_STRIPES or (stripes > 1 and info.stripe_bytes % GRANULE_BYTES):
        raise BadFrame(
            "invalid",
            f"{stripes} stripes of {info.stripe_bytes} bytes (at most {MAX_STRIPES}; several must "
            f"be multiples of {GRANULE_BYTES} bytes, so that each can be read alone)",
        )
    return stripes


def describe(key: bytes, info: FrameInfo, body: memoryview | bytes | bytearray) -> Header:
    """What the header of a frame will say: checks `info` and digests every stripe.

    Raises:
        BadFrame: "invalid": `info` and `body` do not fit together, or are out of range.
    """
    view = memoryview(body).cast("B")
    count_stripes(key, info, len(view))
    return Header(key, info, _digests(view, info.stripe_bytes))


def pack_header(header: Header) -> bytes:
    """The bytes of a header that `describe` or `decode_header` made."""
    key, info, digests = header
    data = bytearray(header_bytes(header.stripes))
    _FIXED.pack_into(
        data,
        0,
        *(MAGIC, VERSION, len(data) // GRANULE_BYTES, b""),
        *(KINDS.index(info.kind), info.codec, info.fidelity, XXH3_128),
        *(key, info.parent, info.namespace, info.tenant, info.layout),
        *(info.group, info.tokens, info.rank, info.world, info.head_start, info.head_stop),
        *(header.stripes, info.stripe_bytes),
    )
    data[_FIXED_BYTES : _FIXED_BYTES + len(digests)] = digests
    data[_DIGEST_AT] = _own_digest(data)
    return bytes(data)


def encode_header(key: bytes, info: FrameInfo, body: memoryview | bytes | bytearray) -> bytes:
    """The header of a frame, with the digests of its body.

    Raises:
        BadFrame: "invalid": `info` and `body` do not fit together, or are out of range.
    """
    return pack_header(describe(key, info, body))


def decode_header(data: bytes | bytearray | memoryview) -> Header:
    """What a header says; `data` begins with it and may go on.

    Raises:
        BadFrame: "foreign", "version", "truncated" or "digest".
    """
    view = memoryview(data).cast("B")
    size = peek_header_bytes(view)
    if len(view) < size:
        raise BadFrame("truncated", f"a header of {size} bytes ends after {len(view)}")
    view = view[:size]
    if _own_digest(view) != view[_DIGEST_AT]:
        raise BadFrame("digest", "the header does not match its digest")
    fields = _FIXED.unpack_from(view)
    kind, codec, fidelity, integrity, key = fields[4:9]
    stripes, step = fields[19:]
    if integrity != XXH3_128 or kind >= len(KINDS) or not 1 <= stripes <= MAX_STRIPES:
        raise BadFrame("version", f"integrity {integrity}, kind {kind} or {stripes} stripes")
    if header_bytes(stripes) != size:
        raise BadFrame("foreign", f"{stripes} stripes in a header of {size} bytes")
    info = FrameInfo(
        kind=KINDS[kind],
        codec=codec,
        fidelity=fidelity,
        parent=fields[9],
        namespace=fields[10],
        tenant=fields[11],
        layout=fields[12],
        group=fields[13],
        tokens=fields[14],
        rank=fields[15],
        world=fields[16],
        head_start=fields[17],
        head_stop=fields[18],
        stripe_bytes=step,
    )
    try:
        count_stripes(key, info, stripes * step)
    except BadFrame as error:
        raise BadFrame("foreign", error.problem) from None
    return Header(key, info, bytes(view[_FIXED_BYTES : _FIXED_BYTES + stripes * DIGEST_BYTES]))


def peek_header_bytes(first_page: bytes | bytearray | memoryview) -> int:
    """How long the header beginning with this page claims to be; bounded, not yet checked.

    Raises:
        BadFrame: "foreign", "version" or "truncated".
    """
    if len(first_page) < GRANULE_BYTES:
        raise BadFrame("truncated", f"a header page ends after {len(first_page)} bytes")
    magic, version, pages = struct.unpack_from("<8sHH", first_page)
    if magic != MAGIC:
        raise BadFrame("foreign", "these bytes do not begin as a frame")
    if version != VERSION:
        raise BadFrame("version", f"frame version {version}, this is version {VERSION}")
    if not 1 <= pages <= header_bytes(MAX_STRIPES) // GRANULE_BYTES:
        raise BadFrame("foreign", f"a header of {pages} pages")
    return int(pages) * GRANULE_BYTES


def verify(header: Header, body: memoryview | bytes | bytearray) -> None:
    """Compares every stripe with its digest.

    Raises:
        BadFrame: "truncated" or "digest".
    """
    view, step = memoryview(body).cast("B"), header.info.stripe_bytes
    if len(view) != header.body_bytes:
        raise BadFrame("truncated", f"{len(view)} bytes of a body of {header.body_bytes}")
    if _digests(view, step) != header.digests:
        for stripe in range(header.stripes):
            verify_stripe(header, stripe, view[stripe * step : (stripe + 1) * step])


def verify_stripe(header: Header, stripe: int, data: memoryview | bytes | bytearray) -> None:
    """Compares one stripe with its digest.

    Raises:
        BadFrame: "digest".
    """
    at = stripe * DIGEST_BYTES
    if xxhash.xxh3_128_digest(data) != header.digests[at : at + DIGEST_BYTES]:
        raise BadFrame("digest", f"stripe {stripe} does not match its digest")


def accept(header: Header, key: bytes, layout: bytes, fidelity: int) -> None:
    """Checks that a frame is the one wished for.

    Raises:
        BadFrame: "key", "layout" or "fidelity".
    """
    if header.key != key:
        raise BadFrame("key", "the frame belongs to another key")
    wanted(header.info, layout, fidelity)


def wanted(info: FrameInfo, layout: bytes, fidelity: int) -> None:
    """Checks that a frame so described suits the reader.

    Raises:
        BadFrame: "layout" or "fidelity".
    """
    if info.layout != layout:
        raise BadFrame("layout", "the frame has another layout")
    if info.fidelity > fidelity:
        raise BadFrame("fidelity", f"the frame descends from {CODECS[info.fidelity]!r}")


def span(header: Header, first: int, count: int) -> range:
    """Numbers of the stripes that a `Load` wishes for.

    Raises:
        BadFrame: "stripes": the frame does not have them.
    """
    end = first + count if count else header.stripes
    if not 0 <= first < end <= header.stripes:
        raise BadFrame("stripes", f"stripes {first} to {end} of {header.stripes}")
    return range(first, end)


def _digests(body: memoryview, step: int) -> bytes:
    stripes = [body[at : at + step] for at in range(0, len(body), step)]
    return b"".join(map(xxhash.xxh3_128_digest, stripes))


def _own_digest(header: bytearray | memoryview) -> bytes:
    view = memoryview(header)
    state = xxhash.xxh3_128(view[: _DIGEST_AT.start])
    state.update(view[_DIGEST_AT.stop :])
    return bytes(state.digest())
