"""Which replica a prompt should go to: where most of it is known, unless others are much less busy.

An index of all replicas is fed by KV events (`flowkv.connect.events`). What a request would cost is
estimated in seconds for each of them: what it has to compute before it, then, of this prompt, what
it does not know, a part of which it may fetch from a tier that all of them share.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowkv.connect.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Hash
from flowkv.core.errors import ConfigError

__all__ = ["Replica", "ReplicaRates", "Router", "Score"]

Replica: TypeAlias = Hashable


class Score(NamedTuple):
    """What a request would find at a replica.

    Attributes:
        seconds: Until its first token, as estimated.
        known: Tokens of the prompt that it has.
        fetched: Further ones that it would fetch from the shared tier.
        computed: The others.
        queued: Tokens that it has to compute before them.
    """

    seconds: float
    known: int
    fetched: int
    computed: int
    queued: int


class ReplicaRates(NamedTuple):
    """How fast a replica is.

    Attributes:
        compute: Prompt tokens a second.
        fetch: Tokens a second from the tier that all share; 0 if there is none.
    """

    compute: float = 5_000.0
    fetch: float = 0.0


_USUAL = ReplicaRates()


class Router:
    """Knows which replica has which prefix, and how busy each is. Thread-safe.

    Blocks are named by their tokens and all before them, so replicas may name theirs as they like;
    blocks of several sizes are told apart. Memory: some 250 bytes a block and replica.

    Args:
        replicas: Names of replicas, in the order in which equals are chosen; more may be added.
        rates: How fast they are.
    """

    def __init__(self, replicas: Iterable[Replica] = (), rates: ReplicaRates = _USUAL) -> None:
        if not (rates.compute > 0 and rates.fetch >= 0):
            raise ConfigError(f"{rates} are no rates", "Give tokens a second above 0")
        self.rates, self._lock = rates, threading.RLock()
        self._holders: dict[bytes, set[Replica]] = {}
        # Of each replica: its name of a block -> ours, and where that is stored.
        self._names: dict[Replica, dict[Hash, tuple[bytes, set[str]]]] = {}
        self._queued: dict[Replica, int] = {}
        self._sizes: dict[int, None] = {}
        for replica in replicas:
            self.add(replica)

    @property
    def replicas(self) -> list[Replica]:
        """Those that requests may go to."""
        return list(self._queued)

    def add(self, replica: Replica) -> None:
        """A replica takes requests from now on; it is not known to have anything."""
        with self._lock:
            self._queued.setdefault(replica, 0)

    def remove(self, replica: Replica) -> None:
        """A replica is gone, and with it what it knew. Requests under way there may end later."""
        with self._lock:
            self._queued.pop(replica, None)
            self._clear(replica)

    def feed(self, replica: Replica, batches: Iterable[EventBatch]) -> None:
        """Takes events of a replica, in their order; one that was removed is not added again."""
        with self._lock:
            if replica not in self._queued:
                return
            for event in (event for batch in batches for event in batch.events):
                if isinstance(event, AllBlocksCleared):
                    self._clear(replica)
                elif event.group_idx:
                    continue  # other groups of layers hold the same tokens
                elif isinstance(event, BlockStored):
                    self._stored(replica, event)
                elif isinstance(event, BlockRemoved):
                    self._removed(replica, event)

    def known(self, tokens: ArrayLike, salt: str = "") -> dict[Replica, int]:
        """How many tokens of a prompt, from its beginning, each replica has.

        Args:
            tokens: Ids of the prompt.
            salt: What else its blocks are told apart by: a cache salt, an adapter.
        """
        ids = np.asarray(tokens, np.int64).ravel()
        with self._lock:
            found = dict.fromkeys(self._queued, 0)
            for size in self._sizes:
                left: Collection[Replica] = found
                for count, name in enumerate(_chain(ids, size, salt), 1):
                    holders = self._holders.get(name, ())
                    left = [replica for replica in left if replica in holders]
                    if not left:
                        break
                    found.update({one: max(found[one], count * size) for one in left})
        return found

    def scores(self, tokens: ArrayLike, salt: str = "") -> dict[Replica, Score]:
        """What a request for this prompt would find at each replica."""
        ids = np.asarray(tokens, np.int64).ravel()
        with self._lock:
            known = self.known(ids, salt)
            shared = max(known.values(), default=0) if self.rates.fetch else 0
            return {one: self._score(one, len(ids), known[one], shared) for one in known}

    def choose(self, tokens: ArrayLike, salt: str = "") -> Replica:
        """The replica where the first token is expected soonest; of equals the least busy one.

        Raises:
            ConfigError: There is no replica.
        """
        scores = self.scores(tokens, salt)
        if not scores:
            raise ConfigError("there is no replica to choose", "Add one first")
        return min(scores, key=lambda one: (scores[one].seconds, scores[one].queued))

    @contextlib.contextmanager
    def request(
        self, tokens: ArrayLike, salt: str = "", *, replica: Replica | None = None
    ) -> Iterator[Replica]:
        """Chooses a replica and counts the request as its work until the block ends.

        To end it with the first token is more exact: what is decoded is not counted.

        Args:
            tokens: Ids of the prompt.
            salt: See `known`.
            replica: The one that was chosen already.

        Raises:
            ConfigError: There is no replica, or none of that name.
        """
        with self._lock:
            chosen = self.choose(tokens, salt) if replica is None else replica
            if chosen not in self._queued:
                raise ConfigError(f"there is no replica {chosen!r}", "Add it first")
            work = self.scores(tokens, salt)[chosen].computed
            self._queued[chosen] += work
        try:
            yield chosen
        finally:
            with self._lock:
                if chosen in self._queued:
                    self._queued[chosen] = max(0, self._queued[chosen] - work)

    def _score(self, replica: Replica, total: int, known: int, shared: int) -> Score:
        rates, queued = self.rates, self._queued[replica]
        more = shared - known if shared > known and rates.fetch > rates.compute else 0
        computed = max(1, total - known - more)  # of a prompt that is all known, the last token
        seconds = (queued + computed) / rates.compute + (more / rates.fetch if more else 0.0)
        return Score(seconds, known, more, computed, queued)

    # ---- what events say

    def _stored(self, replica: Replica, event: BlockStored) -> None:
        size, names = event.block_size, self._names.setdefault(replica, {})
        if size < 1 or len(event.token_ids) != size * len(event.block_hashes):
            return
        above = b""
        if event.parent_block_hash is not None:
            parent = names.get(event.parent_block_hash)
            if parent is None:
                return  # what lies above was never heard of, or is gone: no prompt gets there
            above = parent[0]
        self._sizes[size] = None
        ids = np.array(event.token_ids, np.int64).reshape(-1, size)
        extra = event.extra_keys or [None] * len(ids)
        for block, row, keys in zip(event.block_hashes, ids, extra, strict=False):
            above = _below(above, row, _salt(keys, root=not above))
            names.setdefault(block, (above, set()))[1].add(event.medium or "")
            self._holders.setdefault(above, set()).add(replica)

    def _removed(self, replica: Replica, event: BlockRemoved) -> None:
        names = self._names.get(replica, {})
        for block in event.block_hashes:
            name, media = names.get(block, (b"", set()))
            media.discard(event.medium or "")
            if name and not media:
                del names[block]
                self._leave(name, replica)

    def _clear(self, replica: Replica) -> None:
        for name, _ in self._names.pop(replica, {}).values():
            self._leave(name, replica)

    def _leave(self, name: bytes, replica: Replica) -> None:
        holders = self._holders.get(name, set())
        holders.discard(replica)
        if not holders:
            self._holders.pop(name, None)


def _chain(ids: NDArray[np.int64], size: int, salt: str) -> Iterator[bytes]:
    """Names of the whole blocks of a prompt, root to leaf."""
    above = b""
    for row in ids[: len(ids) // size * size].reshape(-1, size):
        above = _below(above, row, salt)
        salt = ""
        yield above


def _below(above: bytes, row: NDArray[np.int64], salt: str) -> bytes:
    """The name of a block: of what lies above it, its tokens, and what else tells it apart."""
    name = hashlib.blake2b(above, digest_size=16, person=b"flowkv.route/1")
    name.update(len(row).to_bytes(4, "little") + row.tobytes())
    name.update(salt.encode())
    return name.digest()


def _salt(keys: Sequence[object] | None, *, root: bool) -> str:
    """What tells a block apart, less what its root says already: adapters and cache salts."""
    return "\0".join(str(key) for key in keys or () if root or not isinstance(key, str))
