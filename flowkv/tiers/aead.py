"""Authenticated encryption of one frame: AES-256-GCM, a tag per stripe and one for the header.

    key of the frame     `Keyring.frame_key(tenant, salt, chain key)`, used for this frame only
    stripe i             nonce i + 1, associated data: the header's 256 fixed bytes, its tag zeroed
    header               nonce 0, no text, associated data: all bytes of the header, its tag zeroed

The fixed bytes name key, layout, tenant, lineage, generation, lengths and the number of stripes, so
neither a stripe nor a header is valid in any other frame, place or order. The header's tag covers
the stripes' tags. What this does not promise stands in docs/explain/integrity.md.
"""

from __future__ import annotations

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from flowkv.tiers.frame import (
    AES_256_GCM,
    DIGEST_AT,
    DIGEST_BYTES,
    FIXED_BYTES,
    BadFrame,
    Buffer,
    Header,
    decode_header,
    fixed_fields,
    lay_out,
)
from flowkv.tiers.keyring import Keyring

_KEY_AT, _TENANT_AT, _SALT_AT = slice(40, 72), slice(136, 168), slice(232, 248)
_BLANK = bytes(DIGEST_BYTES)


class FrameCipher:
    """Seals and opens the stripes of one frame.

    Args:
        keyring: Derives the frame's key.
        fixed: `fixed_fields` of the frame's header.
    """

    __slots__ = ("_fixed", "_gcm", "_key")

    def __init__(self, keyring: Keyring, fixed: bytes) -> None:
        self._key = keyring.frame_key(fixed[_TENANT_AT], fixed[_SALT_AT], fixed[_KEY_AT])
        self._fixed, self._gcm = fixed, AESGCM(self._key)

    def seal_stripe(self, number: int, plain: memoryview, out: memoryview) -> bytes:
        """Encrypts a stripe to the beginning of `out`, which has room for 16 bytes more.

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
        """Decrypts neighbouring stripes into `target`, whose content is undefined after an error.

        Args:
            numbers: Of the stripes in their frame.
            stored: The stored stripes, one after the other. Where 16 bytes follow a stripe, and are
                writable, its tag is laid there meanwhile, which saves time.
            step: Bytes of each stripe.
            tags: 16 bytes per stripe, in order.
            target: As long as the stripes.

        Raises:
            BadFrame: "digest".
        """
        decrypt, fixed, at, number = self._gcm.decrypt_into, self._fixed, 0, 0
        room = 0 if stored.readonly else len(stored)
        try:
            for n, number in enumerate(numbers):  # a dozen calls a stripe would cost a third
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
        """The bytes of the frame's header, with its tag."""
        data = lay_out(header)
        data[DIGEST_AT] = self._gcm.encrypt(_nonce(0), b"", bytes(data))
        return bytes(data)

    def owns(self, blank: bytes, tag: bytes) -> bool:
        """Whether a header has this tag; in `blank` there are zeros in its place."""
        try:
            self._gcm.decrypt(_nonce(0), tag, blank)
        except InvalidTag:
            return False
        return True


def new_salt(keyring: Keyring, header: Header, body: memoryview) -> bytes:
    """The salt of one frame. Two frames of one key with one salt would share nonces.

    Args:
        keyring: Mixes it.
        header: All that it will say but for salt and tags.
        body: Its plain stripes. A machine that goes on twice from one image may repeat all its
            random numbers, but other content, or another place for it, makes another salt.
    """
    said = fixed_fields(header) + header.sizes + xxhash.xxh3_128_digest(body)
    return keyring.frame_salt(header.info.tenant, said)


def open_header(data: Buffer, keyring: Keyring) -> tuple[Header, FrameCipher]:
    """What the header of an encrypted frame says once its tag is found right, and who opens it.

    Raises:
        BadFrame: "foreign", "version", "truncated", "digest" or "integrity".
    """
    ciphers = []

    def sound(view: memoryview) -> bool:
        blank = b"".join((view[: DIGEST_AT.start], _BLANK, view[DIGEST_AT.stop :]))
        ciphers.append(FrameCipher(keyring, blank[:FIXED_BYTES]))
        return ciphers[0].owns(blank, bytes(view[DIGEST_AT]))

    header = decode_header(data, AES_256_GCM, sound)
    return header, ciphers[0]


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
