"""Frame format: a page, or another blob, as stored below the device; the same in every tier.

    frame  = header | stripe 0 | stripe 1 | ...     header: whole 4 KiB pages, nearly always one
    header = fixed part (256 bytes) | 16 bytes per stripe | stored bytes per stripe | zeros

Fields of the header (little endian), and the range that its digest covers:

       0  magic 8s, version u16, header pages u16, 4 zeros      compared with their fixed values
      16  digest or tag of the header, 16s
      32  kind, codec, fidelity, integrity, lossless, 3 zeros   from here on: digested
      40  key, parent, namespace, tenant, 32s each
     168  layout 16s
     184  group, tokens, rank, world, head start, head stop, stripes, u32 each, 4 zeros
     216  stripe bytes u64, generation u64
     232  salt 16s, 8 zeros
     256  per stripe: digest of its plain bytes, or its tag, 16s
          per stripe, in lossless frames only: stored bytes u32

Stored stripes begin at multiples of 4 KiB, so that each can be read alone. The digest covers
padding too: no bit of a header can change unseen. A plain header is a pure function of key, info,
body and generation: the same frame has the same bytes in memory, on a disk and on the wire. No
field of a header is used before the digest is verified, and no length before it was compared with
the bytes at hand (DESIGN D5, D11).

The byte `integrity` names the check, of header and stripes. New frames have NH-128 (`core.digest`)
or tags; the xxh3_128 of older ones is still verified. Digests find accidents, not attackers: a
reader that requires tags refuses frames without them, and the other way round (`tiers.envelope`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import xxhash

from flowkv.core.digest import digests
from flowkv.core.errors import FlowKVError
from flowkv.core.geometry import FIDELITIES, GRANULE_BYTES
from flowkv.core.keys import KEY_BYTES
from flowkv.tiers.base import FrameInfo

MAGIC = b"FKVFRAME"
VERSION = 2
KINDS = ("page", "state", "weights", "memo")
DIGEST_BYTES = 16
LAYOUT_BYTES = 16
SALT_BYTES = 16
SIZE_BYTES = 4
MAX_STRIPES = 1 << 16
XXH3_128, AES_256_GCM, NH_128 = 0, 1, 2
"""Values of the byte `integrity`."""

FIXED_BYTES = 256
DIGEST_AT, DIGESTED_FROM = slice(16, 32), 32
_FIXED = struct.Struct("<8sHH4x16s 5B3x 32s32s32s32s16s 7I4x QQ 16s8x")
_INTEGRITY_AT = 35
_RESERVED = struct.Struct("<37x3s172x4s32x8s")
_ZEROS = tuple(map(bytes, (3, 4, 8)))
_U32 = 1 << 32

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


class Header(NamedTuple):
    """Fields of a checked header.

    Attributes:
        key: 32 bytes.
        info: The frame's description.
        digests: 16 bytes per stripe, in order: digests of the plain stripes, or tags.
        generation: Number that the tier gave the slot of the frame, or 0.
        integrity: `NH_128`, `XXH3_128` or `AES_256_GCM`.
        salt: 16 random bytes from which the frame's key was derived; zeros without encryption.
        sizes: u32 stored bytes of each stripe; empty where stripes are not compressed.
    """

    key: bytes
    info: FrameInfo
    digests: bytes
    generation: int = 0
    integrity: int = NH_128
    salt: bytes = bytes(SALT_BYTES)
    sizes: bytes = b""

    @property
    def stripes(self) -> int:
        """Return the number of stripes of the body."""
        return len(self.digests) // DIGEST_BYTES

    @property
    def body_bytes(self) -> int:
        """Return the length of the body in bytes, uncompressed."""
        return self.stripes * self.info.stripe_bytes

    @property
    def header_bytes(self) -> int:
        """Return the length of the header in bytes."""
        return header_bytes(self.stripes, lossless=bool(self.sizes))

    @property
    def frame_bytes(self) -> int:
        """Return the bytes of the stored frame: header, stripes and their padding."""
        offset, n_bytes = place(self, 0, self.stripes)
        return offset + n_bytes


@lru_cache(256)
def header_bytes(stripes: int, *, lossless: bool = False) -> int:
    """Return the bytes of the header of a frame with that many stripes."""
    each = DIGEST_BYTES + (SIZE_BYTES if lossless else 0)
    return -(-(FIXED_BYTES + each * stripes) // GRANULE_BYTES) * GRANULE_BYTES


def most_header_bytes(body_bytes: int, *, lossless: bool = False) -> int:
    """Return an upper bound of the header's bytes, given only the length of the body."""
    stripes = min(MAX_STRIPES, max(1, -(-body_bytes // GRANULE_BYTES)))
    return header_bytes(stripes, lossless=lossless)


def count_stripes(key: bytes, info: FrameInfo, body_bytes: int, known: Buffer | None = None) -> int:
    """Check the description of a frame; return the stripes of a body of that length.

    Raises:
        BadFrame: "invalid": a field is out of range, or body, stripes and `known` digests do not
            fit.
    """
    counts = (info.group, info.tokens, info.rank, info.world, info.head_start, info.head_stop)
    names = {len(key), len(info.parent), len(info.namespace), len(info.tenant)}
    if names != {KEY_BYTES} or len(info.layout) != LAYOUT_BYTES:
        raise BadFrame("invalid", "a name has not 32 bytes, or a layout fingerprint not 16")
    if info.kind not in KINDS:
        raise BadFrame("invalid", f"kind {info.kind!r} is none of {', '.join(KINDS)}")
    if not 0 <= info.codec <= info.fidelity < len(FIDELITIES):
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
    if known is not None and len(known) != DIGEST_BYTES * stripes:
        raise BadFrame("invalid", f"{len(known)} bytes of digests of {stripes} stripes")
    return stripes


def describe(key: bytes, info: FrameInfo, body: Buffer, generation: int = 0,
             known: Buffer | None = None) -> Header:  # fmt: skip
    """Build the header of a frame: check `info`, and digest every stripe unless that is `known`.

    Raises:
        BadFrame: "invalid": `info`, `body` and `known` do not fit together, or are out of range.
    """
    view = memoryview(body).cast("B")
    count_stripes(key, info, len(view), known)
    found = digests(view, info.stripe_bytes) if known is None else bytes(known)
    return Header(key, info, found, generation)


def fixed_fields(header: Header) -> bytes:
    """Return the first 256 bytes of a header, with zeros in place of its own digest or tag."""
    key, info, _, generation, integrity, salt, sizes = header
    kind, codec, fidelity, layout, parent, namespace, group, tokens, step, tenant, *shard = info
    return _FIXED.pack(
        *(MAGIC, VERSION, header.header_bytes // GRANULE_BYTES, b""),
        *(KINDS.index(kind), codec, fidelity, integrity, bool(sizes), key, parent, namespace),
        *(tenant, layout, group, tokens, *shard, header.stripes, step, generation, salt),
    )


def lay_out(header: Header) -> bytearray:
    """Return the bytes of a header, with zeros in place of its own digest or tag."""
    return bytearray(
        b"".join((fixed_fields(header), header.digests, header.sizes)).ljust(
            header.header_bytes, b"\0"
        )
    )


def pack_header(header: Header) -> bytes:
    """Return the bytes of a header that `describe` or `decode_header` made."""
    data = lay_out(header)
    data[DIGEST_AT] = _digest_header(memoryview(data))
    return bytes(data)


def encode_header(key: bytes, info: FrameInfo, body: Buffer) -> bytes:
    """Return the bytes of a frame's header, with the digests of its body.

    Raises:
        BadFrame: "invalid": `info` and `body` do not fit together, or are out of range.
    """
    return pack_header(describe(key, info, body))


def decode_header(
    data: Buffer, integrity: int = NH_128, sound: Callable[[memoryview], bool] | None = None
) -> Header:
    """Verify and parse the header at the beginning of `data`, which may be longer.

    Args:
        data: From the beginning of the frame on.
        integrity: `AES_256_GCM` for a tag; any other for a digest, of whatever kind.
        sound: Function that returns whether the bytes of a header are intact; default: compare its
            digest.

    Raises:
        BadFrame: "foreign", "version", "truncated", "digest" or "integrity".
    """
    view = memoryview(data).cast("B")
    size = peek_header_bytes(view)
    if len(view) < size:
        raise BadFrame("truncated", f"a header of {size} bytes ends after {len(view)}")
    view = view[:size]
    found = view[_INTEGRITY_AT]
    if found > NH_128 or (found == AES_256_GCM) != (integrity == AES_256_GCM):
        raise BadFrame("integrity", f"a frame of integrity {found}")
    if not (sound or _sound)(view):
        raise BadFrame("digest", "the header does not match its digest")
    return _parse(view)


def _parse(view: memoryview) -> Header:
    _, _, _, _, kind, codec, fidelity, integrity, lossless, *fields = _FIXED.unpack_from(view)
    key, parent, namespace, tenant, layout, group, tokens, *shard = fields[:11]
    stripes, step, generation, salt = fields[11:]
    if kind >= len(KINDS) or lossless > 1 or not 1 <= stripes <= MAX_STRIPES:
        raise BadFrame("version", f"kind {kind}, lossless {lossless} or {stripes} stripes")
    if _RESERVED.unpack_from(view) != _ZEROS:
        raise BadFrame("foreign", "fields that this version does not know")
    if header_bytes(stripes, lossless=bool(lossless)) != len(view):
        raise BadFrame("foreign", f"{stripes} stripes in a header of {len(view)} bytes")
    names = layout, parent, namespace
    info = FrameInfo(KINDS[kind], codec, fidelity, *names, group, tokens, step, tenant, *shard)
    try:
        count_stripes(key, info, stripes * step)
    except BadFrame as error:
        raise BadFrame("foreign", error.problem) from None
    end = FIXED_BYTES + stripes * DIGEST_BYTES
    sizes = bytes(view[end : end + stripes * SIZE_BYTES]) if lossless else b""
    if lossless and not all(0 < size <= step for (size,) in struct.iter_unpack("<I", sizes)):
        raise BadFrame("foreign", "a stripe is stored in more bytes than it has, or in none")
    digests = bytes(view[FIXED_BYTES:end])
    return Header(key, info, digests, generation, integrity, salt, sizes)


def peek_header_bytes(first_page: Buffer) -> int:
    """Return the length that a header claims on its first page; bounded, not yet verified.

    Raises:
        BadFrame: "foreign", "version" or "truncated".
    """
    if len(first_page) < GRANULE_BYTES:
        raise BadFrame("truncated", f"a header page ends after {len(first_page)} bytes")
    magic, version, pages, zeros = struct.unpack_from("<8sHHI", first_page)
    if magic != MAGIC:
        raise BadFrame("foreign", "these bytes do not begin as a frame")
    if version != VERSION:
        raise BadFrame("version", f"frame version {version}, this is version {VERSION}")
    if zeros or not 1 <= pages <= header_bytes(MAX_STRIPES, lossless=True) // GRANULE_BYTES:
        raise BadFrame("foreign", f"a header of {pages} pages")
    return int(pages) * GRANULE_BYTES


def verify(header: Header, body: Buffer) -> None:
    """Compare every stripe with its digest.

    Raises:
        BadFrame: "truncated" or "digest".
    """
    view = memoryview(body).cast("B")
    if len(view) != header.body_bytes:
        raise BadFrame("truncated", f"{len(view)} bytes of a body of {header.body_bytes}")
    verify_stripes(header, 0, view)


def verify_stripes(header: Header, first: int, data: Buffer) -> None:
    """Compare the stripes in `data`, numbered from `first` on, with their digests.

    Raises:
        BadFrame: "digest".
    """
    found = _digests(header.integrity, data, header.info.stripe_bytes)
    start = first * DIGEST_BYTES
    expected = header.digests[start : start + len(found)]
    for at in range(0, len(found) if found != expected else 0, DIGEST_BYTES):
        if found[at : at + DIGEST_BYTES] != expected[at : at + DIGEST_BYTES]:
            number = first + at // DIGEST_BYTES
            raise BadFrame("digest", f"stripe {number} does not match its digest")


def accept(header: Header, key: bytes, layout: bytes, fidelity: int) -> None:
    """Check that a frame is the requested one.

    Raises:
        BadFrame: "key", "layout" or "fidelity".
    """
    if header.key != key:
        raise BadFrame("key", "the frame belongs to another key")
    wanted(header.info, layout, fidelity)


def wanted(info: FrameInfo, layout: bytes, fidelity: int) -> None:
    """Check that the layout and fidelity of a frame suit the reader.

    Raises:
        BadFrame: "layout" or "fidelity".
    """
    if info.layout != layout:
        raise BadFrame("layout", "the frame has another layout")
    if info.fidelity > fidelity:
        raise BadFrame("fidelity", f"the frame descends from {FIDELITIES[info.fidelity]!r}")


def span(header: Header, first: int, count: int) -> range:
    """Return the numbers of the stripes that a `Load` requests.

    Raises:
        BadFrame: "stripes": they are not all in the frame.
    """
    every = header.stripes
    end = first + count if count else every
    if not 0 <= first < end <= every:
        raise BadFrame("stripes", f"stripes {first} to {end} of {every}")
    return range(first, end)


def place(header: Header, first: int, stripes: int) -> tuple[int, int]:
    """Return the offset and the length in bytes of these stripes in a stored frame."""
    start = header.header_bytes
    if not header.sizes:
        step = header.info.stripe_bytes
        return start + first * step, stripes * step
    sizes = stored_sizes(header)
    wished = sizes[first : first + stripes]
    offset = start + sum(map(aligned, sizes[:first]))
    return offset, sum(map(aligned, wished[:-1])) + wished[-1]


def stored_sizes(header: Header) -> tuple[int, ...]:
    """Return the stored bytes of each stripe of a lossless frame."""
    return struct.unpack(f"<{header.stripes}I", header.sizes)


def aligned(n_bytes: int) -> int:
    """Return `n_bytes` rounded up to the offset where the next stripe begins."""
    return -(-n_bytes // GRANULE_BYTES) * GRANULE_BYTES


def _digests(integrity: int, data: Buffer, step: int) -> bytes:
    """Return digests of each `step` bytes, of the kind that `integrity` names."""
    if integrity != XXH3_128:
        return digests(data, step)
    view = memoryview(data).cast("B")
    stripes = [view[at : at + step] for at in range(0, len(view), step)]
    return b"".join(map(xxhash.xxh3_128_digest, stripes))


def _digest_header(data: memoryview) -> bytes:
    return _digests(data[_INTEGRITY_AT], data[DIGESTED_FROM:], len(data))


def _sound(header: memoryview) -> bool:
    return _digest_header(header) == header[DIGEST_AT]
