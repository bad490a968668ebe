"""The envelope: how a tier's frames are wrapped and checked, by one of two ways, compressed or not.

    write:  sealed = envelope.seal(key, info, body)       -> sealed.header, then sealed.parts
    read:   header = envelope.head(first bytes, key)       checked; a `BadFrame` is a miss
            offset, n_bytes = envelope.place(header, first, stripes)      what to read
            envelope.open(header, stored, target, first, stripes)         checked into the target

| integrity | a frame is right if                    | finds                                       |
|-----------|----------------------------------------|---------------------------------------------|
| "xxh3"    | xxh3_128 of header and stripes agree   | accidents                                   |
| "aead"    | their AES-256-GCM tags do              | also forgery; and hides the content         |

A tier reads one kind only: whoever wants "aead" gets no frame that lacks it, whatever the frame
says about itself. Compression (`tiers.lossless`) is between the body and the check: stripes are
compressed, then encrypted; they are decrypted, decompressed, and without tags digested last.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from flowkv.core.errors import ConfigError
from flowkv.tiers.base import FrameInfo
from flowkv.tiers.frame import (
    AES_256_GCM,
    DIGEST_BYTES,
    XXH3_128,
    BadFrame,
    Buffer,
    Header,
    aligned,
    count_stripes,
    decode_header,
    describe,
    fixed_fields,
    most_header_bytes,
    pack_header,
    place,
    stored_sizes,
    verify_stripe,
)
from flowkv.tiers.keyring import Keyring

if TYPE_CHECKING:
    from flowkv.tiers.aead import FrameCipher
    from flowkv.tiers.lossless import Lossless, Packed

Integrity = Literal["xxh3", "aead"]


class Sealed(NamedTuple):
    """A frame ready to be written: `header`, then all `parts`.

    Attributes:
        header: Whole 4 KiB pages.
        parts: The stored stripes and what aligns them; without compression or encryption the body
            itself, not copied.
        n_bytes: Bytes of header and parts.
        head: What the header says.
    """

    header: bytes
    parts: list[Buffer]
    n_bytes: int
    head: Header


class Envelope:
    """Wraps frames for one tier, and opens what the tier gives back. Thread-safe.

    Args:
        integrity: "xxh3" or "aead".
        keyring: Derives keys for "aead". Without one nothing can be sealed, and every frame read is
            refused with reason "integrity".
        lossless: Decides which pages are compressed; None for none. Compressed frames can be read
            either way.

    Attributes:
        plain: Whether all frames it seals are their bodies behind a header, so that `tiers.check`
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
        """What the headers of its frames say about their integrity."""
        return AES_256_GCM if self.integrity == "aead" else XXH3_128

    def reads(self, integrity: int) -> bool:
        """Whether it can check frames whose headers say so."""
        return integrity == self.kind and (integrity == XXH3_128 or self._keyring is not None)

    def most_bytes(self, body_bytes: int) -> int:
        """Upper bound of a stored frame with such a body, all of it."""
        lossless = self._lossless is not None
        return most_header_bytes(body_bytes, lossless=lossless) + body_bytes

    def seal(self, key: bytes, info: FrameInfo, body: Buffer, *, generation: int = 0) -> Sealed:
        """Wraps a frame. `body` must stay unchanged until the parts are written.

        Args:
            key: 32 bytes.
            info: What the frame says about itself.
            body: The stripes.
            generation: Number of the place where it will lie, if that is part of its identity.

        Raises:
            BadFrame: "invalid": `info` and `body` do not fit together, or are out of range;
                "integrity": there is no key to seal it with.
        """
        view = memoryview(body).cast("B")
        stripes = count_stripes(key, info, len(view))
        packed = self._lossless.pack(info, view) if self._lossless is not None else None
        if self.integrity == "aead":
            header = Header(key, info, bytes(stripes * DIGEST_BYTES), generation, AES_256_GCM)
            return self._encrypt(header, view, packed)
        header = describe(key, info, view, generation)
        if packed is None:
            head = pack_header(header)
            return Sealed(head, [view], len(head) + len(view), header)
        header = header._replace(sizes=packed.sizes)
        head = pack_header(header)
        return Sealed(head, [packed.data], len(head) + len(packed.data), header)

    def head(self, data: Buffer, key: bytes, *, generation: int | None = None) -> Header:
        """What the header of a frame says, checked. `data` begins with it and may go on.

        Args:
            data: From the beginning of the frame on; `tiers.frame.peek_header_bytes` says how much
                is needed, nearly always 4096 bytes.
            key: The frame wished for.
            generation: What the frame must say; None if it does not matter.

        Raises:
            BadFrame: "foreign", "version", "truncated", "digest", "key"; "integrity": it is checked
                in another way than this envelope insists on, or there is no key.
        """
        if self.integrity == "xxh3":
            header = decode_header(data)
        elif self._keyring is None:
            raise BadFrame("integrity", "there is no key for encrypted frames")
        else:
            from flowkv.tiers.aead import open_header

            header, cipher = open_header(data, self._keyring)
            self._thread.last = header, cipher  # most likely opened next, by this thread
        if header.key != key:
            raise BadFrame("key", "the frame belongs to another key")
        if generation is not None and header.generation != generation:
            raise BadFrame("foreign", f"generation {header.generation}, expected {generation}")
        return header

    def place(self, header: Header, first: int, stripes: int) -> tuple[int, int]:
        """Where stored stripes lie in their frame: offset, and bytes from there on.

        A header with the right digest may still name lengths that nothing has: compare them with
        the slot or the object, and the stripes with the target, before memory is found for them.
        """
        return place(header, first, stripes)

    def open(
        self, header: Header, stored: Buffer, target: memoryview, first: int, stripes: int
    ) -> int:
        """Checks stripes and puts them into `target`, whose content is undefined after an error.

        Args:
            header: What `head` returned.
            stored: The bytes that `place` names; they may go on. Memory that nobody else looks at
                meanwhile if it is writable (a tag is laid into it for a moment). The very object
                that is the target checks plain stripes where they lie.
            target: Writable bytes, at least as long as the stripes.
            first: Number of the first stripe.
            stripes: How many.

        Returns:
            Bytes of the stripes.

        Raises:
            BadFrame: "digest", "truncated", "integrity", or "stripes" that the frame has not.
        """
        aead, step = self.integrity == "aead", header.info.stripe_bytes
        if not 0 <= first < first + stripes <= header.stripes:
            raise BadFrame("stripes", f"stripes from {first} on, {stripes} of {header.stripes}")
        if aead and self._keyring is None:
            raise BadFrame("integrity", "there is no key for encrypted frames")
        if header.integrity != (AES_256_GCM if aead else XXH3_128):
            raise BadFrame("integrity", f"a frame of integrity {header.integrity}")
        in_place, n_bytes = target is stored, stripes * step
        view, target = memoryview(stored).cast("B"), target.cast("B")
        if len(view) < place(header, first, stripes)[1]:
            raise BadFrame("truncated", f"stripes end after {len(view)} bytes")
        if len(target) < n_bytes:
            raise BadFrame("invalid", f"{n_bytes} bytes for a target of {len(target)}")
        if aead or header.sizes:
            self._unwrap(header, view, target, range(first, first + stripes))
            return n_bytes
        for number in range(stripes):
            verify_stripe(header, first + number, view[number * step : (number + 1) * step])
        if not in_place:
            target[:n_bytes] = view[:n_bytes]
        return n_bytes

    def _encrypt(self, header: Header, view: memoryview, packed: Packed | None) -> Sealed:
        if self._keyring is None:
            raise BadFrame("integrity", "there is no key to encrypt frames with")
        from flowkv.tiers.aead import FrameCipher, new_salt

        sizes, plain = packed or (b"", view)
        header = header._replace(sizes=sizes)
        header = header._replace(salt=new_salt(self._keyring, header, view))
        cipher, tags = FrameCipher(self._keyring, fixed_fields(header)), []
        out = memoryview(bytearray(len(plain) + DIGEST_BYTES))  # a tag lies behind its stripe first
        for number, offset, size in _extents(header, range(header.stripes)):
            tags.append(cipher.seal_stripe(number, plain[offset : offset + size], out[offset:]))
        header = header._replace(digests=b"".join(tags))
        head = cipher.pack_header(header)
        return Sealed(head, [out[: len(plain)]], len(head) + len(plain), header)

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
                plain = out if size == step else self._scratch_of(size)
                tag = tags[n * DIGEST_BYTES : (n + 1) * DIGEST_BYTES]
                cipher.open_stripes(range(number, number + 1), piece, size, tag, plain)
                piece = plain
            if size < step:
                from flowkv.tiers.lossless import unpack_stripe

                unpack_stripe(piece[:size], out)
            elif cipher is None:
                out[:] = piece[:step]
            if cipher is None:
                verify_stripe(header, number, out)

    def _cipher_of(self, header: Header) -> FrameCipher:
        from flowkv.tiers.aead import FrameCipher

        assert self._keyring is not None
        last: tuple[Header, FrameCipher] | None = getattr(self._thread, "last", None)
        if last is not None and last[0] is header:
            return last[1]
        return FrameCipher(self._keyring, fixed_fields(header))

    def _scratch_of(self, n_bytes: int) -> memoryview:
        held: bytearray | None = getattr(self._thread, "held", None)
        if held is None or len(held) < n_bytes:
            held = self._thread.held = bytearray(n_bytes)
        return memoryview(held)[:n_bytes]


def _extents(header: Header, stripes: range) -> Iterator[tuple[int, int, int]]:
    """Number, offset from the first of them, and stored bytes of stripes."""
    step, offset = header.info.stripe_bytes, 0
    sizes = stored_sizes(header) if header.sizes else None
    for number in stripes:
        size = step if sizes is None else sizes[number]
        yield number, offset, size
        offset += aligned(size)
