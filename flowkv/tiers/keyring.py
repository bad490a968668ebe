"""Keys of encrypted frames, derived from one secret: per tenant, and per frame.

    tenant key = HKDF-SHA256(secret,     salt = none,  info = "flowkv tenant" | tenant salt 32)
    frame key  = HKDF-SHA256(tenant key, salt = 16 random bytes of the frame,
                             info = "flowkv frame" | chain key 32)

All keys have 32 bytes (RFC 5869; the tenant salt is `core.keys.tenant_salt`, so tenants never share
a key). A frame key is used for one frame, sealed once: its salt is drawn anew each time, so nonces
may simply count stripes. Nobody who has frames, or one tenant's key, learns another tenant's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from flowkv.core.errors import ConfigError, MissingDependencyError

LEAST_SECRET_BYTES = 16
_KEY_BYTES = 32
_TENANTS = 1024  # tenant keys remembered


class Keyring:
    """Derives the keys of encrypted frames. Thread-safe; shows the secret to nobody.

    Args:
        secret: At least 16 bytes from a random source, the same wherever the frames are read.

    Raises:
        ConfigError: The secret is too short.
        MissingDependencyError: `cryptography` is not installed.
    """

    __slots__ = ("_hkdf", "_secret", "_sha256", "_tenants")

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

    def __repr__(self) -> str:
        return "Keyring(...)"

    def frame_key(self, tenant: bytes, salt: bytes, key: bytes) -> bytes:
        """The key of one frame.

        Args:
            tenant: Tenant salt, 32 bytes.
            salt: The frame's 16 random bytes.
            key: The frame's chain key, 32 bytes.
        """
        found = self._tenants.get(tenant)
        if found is None:
            found = self._derive(self._secret, None, b"flowkv tenant" + tenant)
            self._tenants[tenant] = found
            if len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)
        return self._derive(found, salt, b"flowkv frame" + key)

    def _derive(self, key: bytes, salt: bytes | None, info: bytes) -> bytes:
        return bytes(self._hkdf(self._sha256(), _KEY_BYTES, salt, info).derive(key))
