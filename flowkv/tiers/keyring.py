"""Keys of encrypted frames, derived from one secret: per tenant, and per frame.

    tenant key = HKDF-SHA256(secret,     salt = none,  info = "flowkv tenant" | tenant salt 32)
    frame key  = HKDF-SHA256(tenant key, salt = 16 bytes of the frame, drawn anew each time,
                             info = "flowkv frame" | chain key 32)
    salt       = BLAKE2b-128(key = tenant key, 16 random bytes | where and when | what is sealed)

All keys have 32 bytes (RFC 5869; the tenant salt is `core.keys.tenant_salt`, so tenants never share
a key). A frame key is used for one frame, sealed once, so nonces may simply count stripes. Where is
the machine, its start, the process and 16 random bytes of the keyring; when are two clocks and a
count. Nobody who has frames, or one tenant's key, learns another tenant's.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from flowkv.core.errors import ConfigError, MissingDependencyError
from flowkv.tiers.frame import SALT_BYTES

LEAST_SECRET_BYTES = 16
_KEY_BYTES = 32
_TENANTS = 1024  # tenant keys remembered
_WHERE = "/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/proc/self/stat"
"""Of the machine, of its start, and of the process, with when that began."""


class Keyring:
    """Derives the keys of encrypted frames. Thread-safe; shows the secret to nobody.

    Args:
        secret: At least 16 bytes from a random source, the same wherever the frames are read.

    Raises:
        ConfigError: The secret is too short.
        MissingDependencyError: `cryptography` is not installed.
    """

    __slots__ = ("_count", "_hkdf", "_secret", "_sha256", "_tenants", "_where")

    def __init__(self, secret: bytes) -> None:
        if len(secret) < LEAST_SECRET_BYTES:
            raise ConfigError(
                f"a secret of {len(secret)} bytes for encrypted frames",
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
        self._tenants: OrderedDict[bytes, bytes] = OrderedDict()
        self._where, self._count = _where() + os.urandom(SALT_BYTES), itertools.count()

    def __repr__(self) -> str:
        return "Keyring(...)"

    def frame_key(self, tenant: bytes, salt: bytes, key: bytes) -> bytes:
        """The key of one frame.

        Args:
            tenant: Tenant salt, 32 bytes.
            salt: The frame's 16 random bytes.
            key: The frame's chain key, 32 bytes.
        """
        return self._derive(self._tenant_key(tenant), salt, b"flowkv frame" + key)

    def frame_salt(self, tenant: bytes, said: bytes) -> bytes:
        """16 bytes that no other frame has, whatever becomes of this machine's random numbers.

        Args:
            tenant: Tenant salt, 32 bytes.
            said: All that the frame will say, and a digest of what is in it.
        """
        numbers = os.getpid(), time.time_ns(), time.perf_counter_ns(), next(self._count)
        parts = os.urandom(SALT_BYTES), self._where, struct.pack("<4Q", *numbers), said
        mixed = hashlib.blake2b(
            key=self._tenant_key(tenant), digest_size=SALT_BYTES, person=b"flowkv.salt/1"
        )
        for part in parts:
            mixed.update(part)
        return mixed.digest()

    def _tenant_key(self, tenant: bytes) -> bytes:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._derive(self._secret, None, b"flowkv tenant" + tenant)
            self._tenants[tenant] = found
            if len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)
        return found

    def _derive(self, key: bytes, salt: bytes | None, info: bytes) -> bytes:
        return bytes(self._hkdf(self._sha256(), _KEY_BYTES, salt, info).derive(key))


def _where() -> bytes:
    """What this machine and process have for themselves, as far as the system tells."""
    mixed = hashlib.blake2b(digest_size=32)
    for name in _WHERE:
        with contextlib.suppress(OSError):
            mixed.update(Path(name).read_bytes())
        mixed.update(b"\0")
    return mixed.digest()
