"""Routing of prompts to the replica that caches most of them, unless others are much less busy.

An index of all replicas is fed by KV events (`flowkv.connect.events`). The cost of a request is
estimated in seconds for each replica: its queued tokens, and the tokens of the prompt that it does
not have, a part of which it may fetch from a tier that all replicas share.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowkv.connect.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Hash
from flowkv.core.errors import ConfigError

__all__ = ["Replica", "ReplicaRates", "Router", "Score"]

Replica: TypeAlias = Hashable


class Score(NamedTuple):
    """Estimated cost of a request at a replica.

    Attributes:
        seconds: Estimated time to its first token.
        known: Tokens of the prompt that the replica has.
        fetched: Further tokens that it would fetch from the shared tier.
        computed: Tokens that it would compute.
        queued: Tokens that it is expected to compute before them.
    """

    seconds: float
    known: int
    fetched: int
    computed: int
    queued: int


class ReplicaRates(NamedTuple):
    """Speed of a replica.

    Attributes:
        compute: Prompt tokens a second.
        fetch: Tokens a second from the shared tier; 0 if there is none.
    """

    compute: float = 5_000.0
    fetch: float = 0.0


_USUAL = ReplicaRates()


class _Queue(dict[int, float]):
    """Work of a replica in seconds, by request; the replica computes one after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock, self._at_s = clock, clock()

    def left_s(self) -> float:
        """Subtract the work done since the last call; return the time until all is done."""
        now_s = self._clock()
        done_s, self._at_s = now_s - self._at_s, now_s
        for number, left_s in self.items():
            self[number] = max(0.0, left_s - done_s)
            done_s = max(0.0, done_s - left_s)
        return sum(self.values())


class Router:
    """Index of the prefixes and the queued work of replicas. Thread-safe.

    Blocks are named by their tokens and all before them, so replicas may use names of their own;
    block sizes are kept apart. Memory: some 250 bytes a block and replica.

    Args:
        replicas: Names of replicas, in the order in which equals are chosen; more may be added.
        rates: Speed of every replica.
        clock: Clock in seconds.
    """

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        rates: ReplicaRates = _USUAL,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not (rates.compute > 0 and rates.fetch >= 0):
            raise ConfigError(f"{rates} are no rates", "Give tokens a second above 0")
        self.rates, self._lock, self._clock = rates, threading.RLock(), clock
        self._holders: dict[bytes, set[Replica]] = {}
        # By replica: its name of a block -> our name, and the media that store the block.
        self._names: dict[Replica, dict[Hash, tuple[bytes, set[str]]]] = {}
        self._queues, self._numbers = dict[Replica, _Queue](), itertools.count()
        self._sizes: dict[int, None] = {}
        for replica in replicas:
            self.add(replica)

    @property
    def replicas(self) -> list[Replica]:
        """Return the replicas that requests may go to."""
        return list(self._queues)

    def add(self, replica: Replica) -> None:
        """Add a replica, with no known blocks."""
        with self._lock:
            self._queues.setdefault(replica, _Queue(self._clock))

    def remove(self, replica: Replica) -> None:
        """Remove a replica and its blocks. Requests under way there may end later."""
        with self._lock:
            self._queues.pop(replica, None)
            self._clear(replica)

    def feed(self, replica: Replica, batches: Iterable[EventBatch]) -> None:
        """Apply events of a replica, in their order; a removed replica is not added again."""
        with self._lock:
            if replica not in self._queues:
                return
            for event in (event for batch in batches for event in batch.events):
                if isinstance(event, AllBlocksCleared):
                    self._clear(replica)
                elif event.group_idx:
                    continue  # other layer groups hold the same tokens
                elif isinstance(event, BlockStored):
                    self._stored(replica, event)
                elif isinstance(event, BlockRemoved):
                    self._removed(replica, event.block_hashes, event.medium or "")

    def known(self, tokens: ArrayLike, salt: str = "") -> dict[Replica, int]:
        """Return how many tokens of a prompt, from its beginning, each replica has.

        Args:
            tokens: Ids of the prompt.
            salt: Further identity of its blocks: a cache salt, an adapter.
        """
        ids = np.asarray(tokens, np.int64).ravel()
        with self._lock:
            found = dict.fromkeys(self._queues, 0)
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
        """Return the estimated cost of a request for this prompt at each replica."""
        ids = np.asarray(tokens, np.int64).ravel()
        with self._lock:
            known = self.known(ids, salt)
            shared = max(known.values(), default=0) if self.rates.fetch else 0
            return {one: self._score(one, len(ids), known[one], shared) for one in known}

    def choose(self, tokens: ArrayLike, salt: str = "") -> Replica:
        """Return the replica with the earliest expected first token, see `ranked`.

        Raises:
            ConfigError: There is no replica.
        """
        for replica in self.ranked(tokens, salt):
            return replica
        raise ConfigError("there is no replica to choose", "Add one first")

    def ranked(self, tokens: ArrayLike, salt: str = "") -> list[Replica]:
        """Return all replicas, ordered by the expected time of the first token.

        Among equals the least busy one comes first, then the one with fewest blocks, so that
        prefixes spread over replicas.
        """
        with self._lock:
            scores = self.scores(tokens, salt)
            has = {one: len(self._names.get(one, ())) for one in scores}
        return sorted(scores, key=lambda one: (scores[one].seconds, scores[one].queued, has[one]))

    @contextlib.contextmanager
    def request(
        self, tokens: ArrayLike, salt: str = "", *, replica: Replica | None = None
    ) -> Iterator[Replica]:
        """Choose a replica, and count the request as its work until the block ends.

        Work is assumed to progress at the rate of `ReplicaRates`, so a block may end late: after
        decoding, or because messages take time.

        Args:
            tokens: Ids of the prompt.
            salt: See `known`.
            replica: A replica that was chosen already.

        Raises:
            ConfigError: There is no replica, or none of that name.
        """
        with self._lock:
            chosen = self.choose(tokens, salt) if replica is None else replica
            if chosen not in self._queues:
                raise ConfigError(f"there is no replica {chosen!r}", "Add it first")
            queue, number = self._queues[chosen], next(self._numbers)
            queue[number] = self.scores(tokens, salt)[chosen].computed / self.rates.compute
        try:
            yield chosen
        finally:
            with self._lock:
                queue.left_s()
                del queue[number]

    def _score(self, replica: Replica, total: int, known: int, shared: int) -> Score:
        rates = self.rates
        queued = round(self._queues[replica].left_s() * rates.compute)
        more = shared - known if shared > known and rates.fetch > rates.compute else 0
        computed = max(1, total - known - more)  # at least the last token
        seconds = (queued + computed) / rates.compute + (more / rates.fetch if more else 0.0)
        return Score(seconds, known, more, computed, queued)

    def _stored(self, replica: Replica, event: BlockStored) -> None:
        size, names = event.block_size, self._names.setdefault(replica, {})
        if size < 1 or len(event.token_ids) != size * len(event.block_hashes):
            return
        above = b""
        if event.parent_block_hash is not None:
            parent = names.get(event.parent_block_hash)
            if parent is None:
                return  # the parent is unknown or gone, so no prompt can reach these blocks
            above = parent[0]
        self._sizes[size] = None
        ids = np.array(event.token_ids, np.int64).reshape(-1, size)
        extra = event.extra_keys or [None] * len(ids)
        for block, row, keys in zip(event.block_hashes, ids, extra, strict=False):
            above = _below(above, row, _salt(keys, root=not above))
            names.setdefault(block, (above, set()))[1].add(event.medium or "")
            self._holders.setdefault(above, set()).add(replica)

    def _removed(self, replica: Replica, blocks: Iterable[Hash], medium: str | None) -> None:
        """Remove blocks from a medium, or from all for None."""
        names = self._names.get(replica, {})
        for block in blocks:
            name, media = names.get(block, (b"", set()))
            media -= media if medium is None else {medium}
            if name and not media:
                del names[block]
                holders = self._holders.get(name, set())  # two of its blocks may have one name
                holders.discard(replica)
                if not holders:
                    self._holders.pop(name, None)

    def _clear(self, replica: Replica) -> None:
        self._removed(replica, list(self._names.get(replica, ())), None)
        self._names.pop(replica, None)


def _chain(ids: NDArray[np.int64], size: int, salt: str) -> Iterator[bytes]:
    """Yield the names of the whole blocks of a prompt, root to leaf."""
    above = b""
    for row in ids[: len(ids) // size * size].reshape(-1, size):
        above = _below(above, row, salt)
        salt = ""
        yield above


def _below(above: bytes, row: NDArray[np.int64], salt: str) -> bytes:
    """Return the name of a block: a digest of its parent's name, its tokens and its salt."""
    name = hashlib.blake2b(above, digest_size=16, person=b"flowkv.route/1")
    name.update(len(row).to_bytes(4, "little") + row.tobytes())
    name.update(salt.encode())
    return name.digest()


def _salt(keys: Sequence[object] | None, *, root: bool) -> str:
    """Return a block's own salt: adapters and cache salts (text) belong to the root alone."""
    return "\0".join(str(key) for key in keys or () if root or not isinstance(key, str))
