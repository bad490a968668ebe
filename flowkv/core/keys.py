"""Names of pages: chained SHA-256 keys that no other content, model, shard or tenant can share.

    key =
      SHA-256(tag | namespace 32 | tenant salt 32 | group u32 | parent key 32
              | n_tokens u32 | token ids u32 LE ... | n_salts u32 | (offset u32 | digest 32) ...)

All integers are little-endian, salts are sorted, fixed parts have fixed lengths and every variable
part is preceded by its count, so no two different inputs share a preimage. A root has the all-zero
parent. Weak prefix hashes are an attack surface (CVE-2025-25183); the full 32 bytes are stored and
compared everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError, TokenError

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)
_PAGE_TAG = b"flowkv.page/1\0\0\0"
_STATE_TAG = b"flowkv.state/1\0\0"


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of each layer's KV heads that a process holds (tensor parallelism).

    Attributes:
        rank: This process, from 0.
        world: Number of processes.
        head_start: First KV head held.
        head_stop: One past the last; 0 means all heads.
    """

    rank: int = 0
    world: int = 1
    head_start: int = 0
    head_stop: int = 0


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that must be equal for two runs to produce the same K and V from the same tokens.

    Attributes:
        model: Model id, or any name the user gives.
        revision: Revision of the model.
        weights: Fingerprint of the weights (hex), "" when the name alone is trusted.
        adapter: Active adapter and its fingerprint, "" for none.
        rope: Position encoding, as canonical text.
        computation: Digest of the computation with the weights: code, settings, hooks.
        geometry: `Geometry.fingerprint()` as hex; holds dtype and page size.
        shard: Part of the heads.
    """

    model: str
    revision: str = ""
    weights: str = ""
    adapter: str = ""
    rope: str = ""
    geometry: str = ""
    shard: Shard = Shard()
    computation: str = ""

    @property
    def title(self) -> str:
        """Return model, revision and adapter as readable text."""
        revision = f"@{self.revision}" if self.revision else ""
        return self.model + revision + (f" with {self.adapter}" if self.adapter else "")

    def digest(self) -> bytes:
        """Return 32 bytes over all fields."""
        fields = msgspec.to_builtins(self)
        if not self.computation:  # as digests were before the field existed
            del fields["computation"]
        return hashlib.sha256(msgspec.json.encode(["namespace/1", fields])).digest()


class Salt(msgspec.Struct, frozen=True):
    """Input besides the token ids that K and V depend on, such as an image.

    Attributes:
        position: First token that depends on it. All later pages differ too, through their parent.
        digest: 32 bytes of the content.

    Raises:
        TokenError: The position is negative, or the digest has another length.
    """

    position: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.position < 0 or len(self.digest) != KEY_BYTES:
            raise TokenError(
                f"a salt of {len(self.digest)} bytes at position {self.position}",
                "Pass a SHA-256 of the content, and the index of the first token it touches",
            )


def tenant_salt(tenant: str, secret: bytes = b"") -> bytes:
    """Return 32 bytes that separate tenants; with `secret`, keys cannot be guessed from known text.

    Raises:
        ConfigError: The tenant is no string, or one that cannot be encoded.
    """
    # BLAKE2b takes keys of up to 64 bytes; cutting a longer one would ignore the rest of it.
    key = secret if len(secret) <= 64 else hashlib.blake2b(secret).digest()
    try:
        name = tenant.encode()
    except (AttributeError, UnicodeEncodeError) as error:  # no string, or one with a lone surrogate
        raise ConfigError(f"tenant={tenant!r}", "Name a tenant by a string of Unicode") from error
    return hashlib.blake2b(name, digest_size=32, key=key, person=b"flowkv.tenant/1").digest()


def as_tokens(
    tokens: Iterable[int] | NDArray[np.generic], vocabulary: int = 1 << 32
) -> NDArray[np.uint32]:
    """Return token ids as a fresh uint32 array.

    Raises:
        TokenError: Not a flat list of integers in [0, vocabulary).
    """
    try:
        given = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    except (TypeError, ValueError) as error:  # None, or lists of unequal lengths
        raise TokenError(
            f"token ids of type {type(tokens).__name__} ({error})",
            "Pass one flat sequence of integers",
        ) from None
    vocabulary = min(vocabulary, 1 << 32)  # a larger id would wrap around in the cast below
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TokenError(
            f"token ids of shape {given.shape} and type {given.dtype}",
            "Pass one flat sequence of integers; of a batch, one row at a time, as in ids[0]",
        )
    if given.size and (int(given.min()) < 0 or int(given.max()) >= vocabulary):
        raise TokenError(
            f"token ids reach from {int(given.min())} to {int(given.max())}",
            f"Ids must lie in [0, {vocabulary})",
        )
    return given.astype(np.uint32)


class KeyChain:
    """Key derivation for one sequence of one tenant in one layer group.

    Args:
        namespace: `Namespace.digest()`.
        tenant: `tenant_salt(...)`.
        group: Index of the layer group.
        page_size: Tokens per page.

    Raises:
        ConfigError: A digest is not of 32 bytes, or the group is no u32.
    """

    __slots__ = ("_base", "_state_base", "page_size")

    def __init__(self, namespace: bytes, tenant: bytes, group: int, page_size: int) -> None:
        if len(namespace) != KEY_BYTES or len(tenant) != KEY_BYTES or not 0 <= group < 1 << 32:
            raise ConfigError(
                f"a namespace of {len(namespace)} bytes, a tenant of {len(tenant)}, group {group}",
                "Pass Namespace.digest(), tenant_salt(...) and the index of a group",
            )
        head = namespace + tenant + group.to_bytes(4, "little")
        self._base = hashlib.sha256(_PAGE_TAG + head)
        self._state_base = hashlib.sha256(_STATE_TAG + head)
        self.page_size = page_size

    def page(self, parent: bytes, tokens: NDArray[np.uint32], salts: Sequence[Salt] = ()) -> bytes:
        """Return the key of a page below `parent`; positions of salts count within the page."""
        return self._digests(self._base, parent, [(tokens, salts)])[0]

    def state(self, parent: bytes, tokens: NDArray[np.uint32], salts: Sequence[Salt] = ()) -> bytes:
        """Return the key of a snapshot after `tokens`, a partial page below `parent`."""
        return self._digests(self._state_base, parent, [(tokens, salts)])[0]

    def keys(
        self,
        tokens: NDArray[np.uint32],
        salts: Sequence[Salt] = (),
        *,
        start: int = 0,
        parent: bytes = ROOT,
    ) -> list[bytes]:
        """Return the keys of all full pages of `tokens` from page `start` on, below `parent`."""
        size = self.page_size
        firsts = range(start * size, len(tokens) // size * size, size)
        here = [within(salts, first, size) if salts else () for first in firsts]
        pages = [(tokens[at : at + size], some) for at, some in zip(firsts, here, strict=True)]
        return self._digests(self._base, parent, pages)

    @staticmethod
    def _digests(
        base: hashlib._Hash,
        parent: bytes,
        pages: Sequence[tuple[NDArray[np.uint32], Sequence[Salt]]],
    ) -> list[bytes]:
        """Return the keys of pages below `parent`, each below the one before."""
        if pages and len(parent) != KEY_BYTES:
            raise TokenError(
                f"a parent key of {len(parent)} bytes", "Pass ROOT or a key that `page` returned"
            )
        keys = list[bytes]()
        for tokens, salts in pages:
            state = base.copy()
            state.update(parent)
            state.update(len(tokens).to_bytes(4, "little"))
            state.update(tokens.astype("<u4", copy=False).tobytes())
            state.update(len(salts).to_bytes(4, "little"))
            for salt in sorted(salts, key=lambda salt: (salt.position, salt.digest)):
                state.update(salt.position.to_bytes(4, "little") + salt.digest)
            parent = state.digest()
            keys.append(parent)
        return keys


def within(salts: Sequence[Salt], first: int, count: int) -> list[Salt]:
    """Return the salts that begin in `count` tokens from `first` on, with relative positions."""
    return [
        Salt(salt.position - first, salt.digest)
        for salt in salts
        if first <= salt.position < first + count
    ]
