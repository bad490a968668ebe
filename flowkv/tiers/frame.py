"""Frames: their format below the device, the same in every tier, and their sealing and checking.

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
reader that requires tags refuses frames without them, and the other way round (`Envelope`).

The envelope seals and checks a tier's frames in one of two ways, compressed or not.

write:  sealed = envelope.seal(key, info, body)       -> sealed.header, then sealed.parts
    read:   header = envelope.head(first bytes, key)       checked; a `BadFrame` is a miss
            offset, n_bytes = envelope.place(header, first, stripes)      range to read
            envelope.open(header, stored, target, first, stripes)         checked into the target

| integrity | a frame is right if                    | finds                                       |
|-----------|----------------------------------------|---------------------------------------------|
| "xxh3"    | digests of header and stripes agree    | accidents                                   |
| "aead"    | their AES-256-GCM tags do              | also forgery; and hides the content         |

A tier reads one kind only: with "aead" every frame without tags is refused, whatever its header
claims. Compression (`tiers.lossless`) is between the body and the check: stripes are compressed,
then encrypted; they are decrypted, decompressed, and without tags digested last.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import xxhash

from flowkv.core.digest import digests
from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.core.geometry import FIDELITIES, GRANULE_BYTES
from flowkv.core.keys import KEY_BYTES
from flowkv.core.memory import Scratch
from flowkv.tiers.base import BadFrame, Buffer, FrameInfo, aligned

if TYPE_CHECKING:
    from flowkv.tiers.lossless import CompressedBody, Lossless

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


with contextlib.suppress(ImportError):  # the extra aead: without it no `Keyring` can be made
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# Keys of encrypted frames, derived from one secret: per tenant, and per frame.
#
#     tenant key = HKDF-SHA256(secret,     salt = none,  info = "flowkv tenant" | tenant salt 32)
#     frame key  = HKDF-SHA256(tenant key, salt = 16 bytes of the frame, drawn anew each time,
#                              info = "flowkv frame" | chain key 32)
#     salt       = BLAKE2b-128(key = tenant key, 16 random bytes | where | when | sealed content)
#
# All keys have 32 bytes (RFC 5869; the tenant salt is `core.keys.tenant_salt`, so tenants never
# share a key). A frame key is used for one frame, sealed once, so nonces may simply count stripes.
# "Where" is the machine, its start, the process and 16 random bytes of the keyring; "when" is two
# clocks and a count. Neither frames nor one tenant's key reveal another tenant's key.

LEAST_SECRET_BYTES = 16
_KEY_BYTES = 32
_TENANTS = 1024  # tenant keys remembered
_SCRATCH = Scratch()
_WHERE = "/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/proc/self/stat"
"""Files that identify the machine, its start, and the process with its start time."""


class Keyring:
    """Key derivation for encrypted frames. Thread-safe; never shows the secret.

    Args:
        secret: At least 16 bytes from a random source, the same wherever the frames are read.

    Raises:
        ConfigError: The secret is too short.
        MissingDependencyError: `cryptography` is not installed.
    """

    __slots__ = ("_count", "_hkdf", "_secret", "_sha256", "_tenant_key", "_where")

    def __init__(self, secret: bytes) -> None:
        if len(secret) < LEAST_SECRET_BYTES:
            raise ConfigError(
                f"a secret of {len(secret)} bytes is too short to encrypt frames",
                f"Give at least {LEAST_SECRET_BYTES} random bytes, for instance"
                " secrets.token_bytes(32), kept apart from the frames",
            )
        try:
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise MissingDependencyError(
                "encryption of frames (integrity='aead')", "aead"
            ) from None
        self._secret = bytes(secret)
        self._hkdf: Any = HKDF
        self._sha256: Any = SHA256
        self._tenant_key = lru_cache(_TENANTS)(self._derive_tenant)
        self._where, self._count = _where() + os.urandom(SALT_BYTES), itertools.count()

    def __repr__(self) -> str:
        return "Keyring(...)"

    def frame_key(self, tenant: bytes, salt: bytes, key: bytes) -> bytes:
        """Return the key of one frame.

        Args:
            tenant: Tenant salt, 32 bytes.
            salt: The frame's 16 random bytes.
            key: The frame's chain key, 32 bytes.
        """
        return self._derive(self._tenant_key(tenant), salt, b"flowkv frame" + key)

    def frame_salt(self, tenant: bytes, said: bytes) -> bytes:
        """Return 16 bytes unique to a frame, even if the machine repeats its random numbers.

        Args:
            tenant: Tenant salt, 32 bytes.
            said: All fields of the frame's header, and a digest of its content.
        """
        numbers = os.getpid(), time.time_ns(), time.perf_counter_ns(), next(self._count)
        parts = os.urandom(SALT_BYTES), self._where, struct.pack("<4Q", *numbers), said
        mixed = hashlib.blake2b(
            key=self._tenant_key(tenant), digest_size=SALT_BYTES, person=b"flowkv.salt/1"
        )
        for part in parts:
            mixed.update(part)
        return mixed.digest()

    def _derive_tenant(self, tenant: bytes) -> bytes:
        return self._derive(self._secret, None, b"flowkv tenant" + tenant)

    def _derive(self, key: bytes, salt: bytes | None, info: bytes) -> bytes:
        return bytes(self._hkdf(self._sha256(), _KEY_BYTES, salt, info).derive(key))


def _where() -> bytes:
    """Return a digest that identifies this machine and process, as far as the system allows."""
    mixed = hashlib.blake2b(digest_size=32)
    for name in _WHERE:
        with contextlib.suppress(OSError):
            mixed.update(Path(name).read_bytes())
        mixed.update(b"\0")
    return mixed.digest()


Integrity = Literal["xxh3", "aead"]


class SealedFrame(NamedTuple):
    """Frame ready to be written: `header`, then all `parts`.

    Attributes:
        header: Whole 4 KiB pages.
        parts: The stored stripes and their padding; without compression or encryption the body
            itself, not copied.
        n_bytes: Bytes of header and parts.
        head: Fields of the header.
    """

    header: bytes
    parts: list[Buffer]
    n_bytes: int
    head: Header

    def write(self, memory: memoryview) -> int:
        """Copy the frame to the beginning of some memory; return its bytes."""
        end = 0
        for part in (self.header, *self.parts):
            view = memoryview(part).cast("B")
            memory[end : end + len(view)] = view
            end += len(view)
        return end


class Envelope:
    """Seals the frames of one tier, and checks and opens them again. Thread-safe.

    Args:
        integrity: "xxh3" or "aead".
        keyring: Derives keys for "aead". Without one no frame can be sealed, and every frame read
            is refused with reason "integrity".
        lossless: Decides which pages are compressed; None for none. Compressed frames can be read
            either way.

    Attributes:
        plain: Whether all sealed frames are their bodies behind a header, so that `tiers.digest`
            may open them.

    Raises:
        ConfigError: Another integrity.
    """

    def __init__(
        self,
        *,
        integrity: Integrity = "xxh3",
        keyring: Keyring | None = None,
        lossless: Lossless | None = None,
    ) -> None:
        if integrity not in ("xxh3", "aead"):
            raise ConfigError(f"integrity={integrity!r}", "Use 'xxh3' or 'aead'")
        self.integrity, self.plain = integrity, integrity == "xxh3" and lossless is None
        self._keyring = keyring if integrity == "aead" else None
        self._lossless = lossless
        self._thread = threading.local()

    @property
    def kind(self) -> int:
        """Return the value of `integrity` in the headers of sealed frames."""
        return AES_256_GCM if self.integrity == "aead" else NH_128

    def reads(self, integrity: int) -> bool:
        """Return whether frames with this `integrity` in their headers can be checked."""
        aead = self.integrity == "aead"
        return (integrity == AES_256_GCM) == aead and (self._keyring is not None or not aead)

    def most_bytes(self, body_bytes: int) -> int:
        """Return an upper bound of the bytes of a stored frame with such a body and its header."""
        lossless = self._lossless is not None
        return most_header_bytes(body_bytes, lossless=lossless) + body_bytes

    def seal(self, key: bytes, info: FrameInfo, body: Buffer, *, generation: int = 0,
             known: Buffer | None = None) -> SealedFrame:  # fmt: skip
        """Seal a frame. `body` must stay unchanged until the parts are written.

        Args:
            key: 32 bytes.
            info: Description of the frame.
            body: The stripes.
            generation: Number of the slot that will hold the frame, if that is part of its
                identity.
            known: Digests of the stripes, if they are known.

        Raises:
            BadFrame: "invalid": the arguments do not fit together, or are out of range;
                "integrity": there is no key to seal it with.
        """
        view = memoryview(body).cast("B")
        stripes = count_stripes(key, info, len(view))
        packed = self._lossless.pack(info, view) if self._lossless is not None else None
        if self.integrity == "aead":
            header = Header(key, info, bytes(stripes * DIGEST_BYTES), generation, AES_256_GCM)
            return self._encrypt(header, view, packed)
        sizes, data = packed or (b"", view)
        header = describe(key, info, view, generation, known)._replace(sizes=sizes)
        head = pack_header(header)
        return SealedFrame(head, [data], len(head) + len(data), header)

    def head(self, data: Buffer, key: bytes, *, generation: int | None = None) -> Header:
        """Check and parse the header of a frame. `data` begins with it and may be longer.

        Args:
            data: From the beginning of the frame on; `tiers.frame.peek_header_bytes` returns the
                length needed, nearly always 4096 bytes.
            key: Key of the requested frame.
            generation: Generation that the header must have; None for any.

        Raises:
            BadFrame: "foreign", "version", "truncated", "digest", "key"; "integrity": the frame is
                checked in another way than this envelope requires, or there is no key.
        """
        if self.integrity == "xxh3":
            header = decode_header(data)
        elif self._keyring is None:
            raise BadFrame("integrity", "there is no key for encrypted frames")
        else:
            header = self._head_of_encrypted(data, self._keyring)
        if header.key != key:
            raise BadFrame("key", "the frame belongs to another key")
        if generation is not None and header.generation != generation:
            raise BadFrame("foreign", f"generation {header.generation}, expected {generation}")
        return header

    def place(self, header: Header, first: int, stripes: int) -> tuple[int, int]:
        """Return the offset and the length in bytes of stored stripes in their frame.

        A header with the right digest may still carry impossible lengths: compare them with the
        slot or the object, and the stripes with the target, before allocating memory for them.
        """
        return place(header, first, stripes)

    def open(
        self, header: Header, stored: Buffer, target: memoryview, first: int, stripes: int
    ) -> int:
        """Check stripes and write them to `target`; its content is undefined after an error.

        Args:
            header: Result of `head`.
            stored: The bytes in the range of `place`; more may follow. If writable, the memory must
                not be read elsewhere meanwhile (a tag is written into it for a moment).
            target: Writable bytes, at least as long as the stripes.
            first: Number of the first stripe.
            stripes: Number of stripes.

        Returns:
            Bytes of the stripes.

        Raises:
            BadFrame: "digest", "truncated", "integrity", or "stripes" outside of the frame.
        """
        aead, step = self.integrity == "aead", header.info.stripe_bytes
        if not 0 <= first < first + stripes <= header.stripes:
            raise BadFrame("stripes", f"stripes from {first} on, {stripes} of {header.stripes}")
        if aead and self._keyring is None:
            raise BadFrame("integrity", "there is no key for encrypted frames")
        if (header.integrity == AES_256_GCM) != aead:
            raise BadFrame("integrity", f"a frame of integrity {header.integrity}")
        n_bytes, view, target = stripes * step, memoryview(stored).cast("B"), target.cast("B")
        if len(view) < place(header, first, stripes)[1]:
            raise BadFrame("truncated", f"stripes end after {len(view)} bytes")
        if len(target) < n_bytes:
            raise BadFrame("invalid", f"{n_bytes} bytes for a target of {len(target)}")
        if aead or header.sizes:
            self._unwrap(header, view, target, range(first, first + stripes))
            return n_bytes
        verify_stripes(header, first, view[:n_bytes])
        target[:n_bytes] = view[:n_bytes]
        return n_bytes

    def _encrypt(
        self, header: Header, view: memoryview, packed: CompressedBody | None
    ) -> SealedFrame:
        if self._keyring is None:
            raise BadFrame("integrity", "there is no key to encrypt frames with")

        sizes, plain = packed or (b"", view)
        header = header._replace(sizes=sizes)
        header = header._replace(salt=new_salt(self._keyring, header, view))
        cipher, tags = FrameCipher(self._keyring, fixed_fields(header)), []
        # each tag is first written behind its stripe
        out = memoryview(bytearray(len(plain) + DIGEST_BYTES))
        for number, offset, size in _extents(header, range(header.stripes)):
            tags.append(cipher.seal_stripe(number, plain[offset : offset + size], out[offset:]))
        header = header._replace(digests=b"".join(tags))
        head = cipher.pack_header(header)
        return SealedFrame(head, [out[: len(plain)]], len(head) + len(plain), header)

    def _unwrap(
        self, header: Header, stored: memoryview, target: memoryview, stripes: range
    ) -> None:
        step = header.info.stripe_bytes
        tags = header.digests[stripes.start * DIGEST_BYTES : stripes.stop * DIGEST_BYTES]
        cipher = self._cipher_of(header) if self._keyring is not None else None
        if cipher is not None and not header.sizes:
            cipher.open_stripes(stripes, stored, step, tags, target[: len(stripes) * step])
            return
        for n, (number, offset, size) in enumerate(_extents(header, stripes)):
            out, piece = target[n * step : (n + 1) * step], stored[offset:]
            if cipher is not None:
                plain = out if size == step else _SCRATCH.array("plain", np.uint8, size).data
                tag = tags[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES]
                cipher.open_stripes(range(number, number + 1), piece, size, tag, plain)
                piece = plain
            if size < step:
                from flowkv.tiers.lossless import unpack_stripe

                unpack_stripe(piece[:size], out)
            elif cipher is None:
                out[:] = piece[:step]
            if cipher is None:
                verify_stripes(header, number, out)

    def _head_of_encrypted(self, data: Buffer, keyring: Keyring) -> Header:
        """Return the fields of an encrypted frame's header, once its tag is verified."""
        ciphers = []

        def sound(view: memoryview) -> bool:
            blank = b"".join((view[: DIGEST_AT.start], _BLANK, view[DIGEST_AT.stop :]))
            ciphers.append(FrameCipher(keyring, blank[:FIXED_BYTES]))
            return ciphers[0].owns(blank, bytes(view[DIGEST_AT]))

        header = decode_header(data, AES_256_GCM, sound)
        self._thread.last = header, ciphers[0]  # this thread will most likely open its stripes next
        return header

    def _cipher_of(self, header: Header) -> FrameCipher:
        assert self._keyring is not None
        last: tuple[Header, FrameCipher] | None = getattr(self._thread, "last", None)
        if last is not None and last[0] is header:
            return last[1]
        return FrameCipher(self._keyring, fixed_fields(header))


def _extents(header: Header, stripes: range) -> Iterator[tuple[int, int, int]]:
    """Yield number, offset from the first one, and stored bytes of each stripe."""
    step, offset = header.info.stripe_bytes, 0
    sizes = stored_sizes(header) if header.sizes else None
    for number in stripes:
        size = step if sizes is None else sizes[number]
        yield number, offset, size
        offset += aligned(size)


# Authenticated encryption of one frame: AES-256-GCM, a tag per stripe and one for the header.
#
#     key of the frame   `Keyring.frame_key(tenant, salt, chain key)`, used for this frame only
#     stripe i           nonce i + 1; associated data: the header's 256 fixed bytes, tag zeroed
#     header             nonce 0, no text; associated data: all bytes of the header, tag zeroed
#
# The fixed bytes name key, layout, tenant, lineage, generation, lengths and the number of stripes,
# so neither a stripe nor a header is valid in any other frame, place or order. The header's tag
# covers the stripes' tags. The limits of this scheme are described in docs/explain/integrity.md.

_KEY_AT, _TENANT_AT, _SALT_AT = slice(40, 72), slice(136, 168), slice(232, 248)
_BLANK = bytes(DIGEST_BYTES)


class FrameCipher:
    """Cipher that seals and opens the stripes of one frame.

    Args:
        keyring: Derives the frame's key.
        fixed: `fixed_fields` of the frame's header.
    """

    __slots__ = ("_fixed", "_gcm", "_key")

    def __init__(self, keyring: Keyring, fixed: bytes) -> None:
        self._key = keyring.frame_key(fixed[_TENANT_AT], fixed[_SALT_AT], fixed[_KEY_AT])
        self._fixed, self._gcm = fixed, AESGCM(self._key)

    def seal_stripe(self, number: int, plain: memoryview, out: memoryview) -> bytes:
        """Encrypt a stripe to the beginning of `out`, which has room for 16 bytes more.

        Returns:
            The tag. Those 16 bytes are left as zeros.
        """
        size, end = len(plain), len(plain) + DIGEST_BYTES
        self._gcm.encrypt_into(_nonce(number + 1), plain, self._fixed, out[:end])
        tag = bytes(out[size:end])
        out[size:end] = _BLANK
        return tag

    def open_stripes(
        self, numbers: range, stored: memoryview, step: int, tags: bytes, target: memoryview
    ) -> None:
        """Decrypt neighbouring stripes into `target`; its content is undefined after an error.

        Args:
            numbers: Numbers of the stripes in their frame.
            stored: The stored stripes, one after the other. Where 16 writable bytes follow a
                stripe, its tag is written there for the call, which saves time.
            step: Bytes of each stripe.
            tags: 16 bytes per stripe, in order.
            target: As long as the stripes.

        Raises:
            BadFrame: "digest".
        """
        decrypt, fixed, at, number = self._gcm.decrypt_into, self._fixed, 0, 0
        room = 0 if stored.readonly else len(stored)
        try:
            for n, number in enumerate(numbers):  # a dozen calls per stripe would cost a third
                nonce, tag = _nonce(number + 1), tags[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES]
                end = at + step
                stop = end + DIGEST_BYTES
                if stop > room:
                    self._open_apart(nonce, tag, stored[at:end], target[at:end])
                else:
                    kept = bytes(stored[end:stop])
                    stored[end:stop] = tag
                    try:
                        decrypt(nonce, stored[at:stop], fixed, target[at:end])
                    finally:
                        stored[end:stop] = kept
                at = end
        except InvalidTag:
            raise BadFrame("digest", f"stripe {number} does not match its tag") from None

    def _open_apart(self, nonce: bytes, tag: bytes, stored: memoryview, target: memoryview) -> None:
        cipher = Cipher(algorithms.AES(self._key), modes.GCM(nonce, tag)).decryptor()
        cipher.authenticate_additional_data(self._fixed)
        cipher.update_into(stored, target)
        cipher.finalize()

    def pack_header(self, header: Header) -> bytes:
        """Return the bytes of the frame's header, with its tag."""
        data = lay_out(header)
        data[DIGEST_AT] = self._gcm.encrypt(_nonce(0), b"", bytes(data))
        return bytes(data)

    def owns(self, blank: bytes, tag: bytes) -> bool:
        """Return whether a header has this tag; `blank` is the header with zeros for the tag."""
        try:
            self._gcm.decrypt(_nonce(0), tag, blank)
        except InvalidTag:
            return False
        return True


def new_salt(keyring: Keyring, header: Header, body: memoryview) -> bytes:
    """Return a salt for one frame. Two frames of one key with one salt would share nonces.

    Args:
        keyring: Mixes it.
        header: All fields of the header except salt and tags.
        body: The plain stripes. A machine that resumes twice from one image may repeat all its
            random numbers, but other content, or another place for it, makes another salt.
    """
    said = fixed_fields(header) + header.sizes + xxhash.xxh3_128_digest(body)
    return keyring.frame_salt(header.info.tenant, said)


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
