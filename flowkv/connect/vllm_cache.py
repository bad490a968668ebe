"""What FlowKV does for vLLM's own cache: eviction policies, hints and recordings of requests.

vLLM names a chunk by a hash of its tokens and all before them, and by the number of its layer
group in the last four bytes. Importing this module imports vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count, groupby, pairwise
from typing import Any

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

from flowkv.connect.hints import Retention, hint_of
from flowkv.observe.recording import Writer
from flowkv.policy.base import Lease, lease_of
from flowkv.policy.warming import warming
from flowkv.residency.places import KeyedPolicy

_log = logging.getLogger("flowkv")
_bad_hints = count()


def group_of(key: bytes) -> int:
    """Return the number of a chunk's layer group."""
    return int.from_bytes(key[-4:], "big")


def ends_of(req_context: Any) -> dict[bytes, int]:
    """Return the end of each of a request's chunks in tokens, from a private attribute of vLLM."""
    found: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return found


def chains_of(ends: Mapping[bytes, int]) -> dict[int, list[bytes]]:
    """Return a request's chunks by their groups, root to leaf."""
    found: dict[int, list[bytes]] = {}
    for key in sorted(ends, key=ends.__getitem__):
        found.setdefault(group_of(key), []).append(key)
    return found


def parents_of(ends: Mapping[bytes, int]) -> dict[bytes, bytes]:
    """Return the chunk before each one in its group."""
    chains = chains_of(ends).values()
    return {key: above for chain in chains for above, key in pairwise(chain)}


def tenant_of(req_context: Any) -> str:
    """Return the tenant that a request names in its transfer parameters; "" for none."""
    return str((req_context.kv_transfer_params or {}).get("flowkv_tenant") or "")


def hint_in(req_context: Any) -> Retention:
    """Return the hint of a request, which is read once."""
    hint: Retention | None = req_context.get_state(Retention)
    if hint is None:
        hint = hint_of(req_context.kv_transfer_params, req_context.kv_hints, time.time())
        req_context.set_state(hint)
        if hint.dropped and not next(_bad_hints):
            _log.warning("a hint has no effect, nor may later ones, unreported: %s", hint.problem)
    return hint


def leases_in(req_context: Any, keys: Iterable[bytes] | None = None) -> dict[bytes, Lease]:
    """Return the leases of those of a request's chunks, or of all, that its hint covers."""
    spans, ends = hint_in(req_context).spans, ends_of(req_context)
    chosen = [key for key in (ends if keys is None else keys) if key in ends]
    if not spans or not chosen:
        return {}
    above = parents_of(ends)
    found = {key: lease_of(spans, ends.get(above.get(key, b""), 0), ends[key]) for key in chosen}
    return {key: lease for key, lease in found.items() if lease is not None}


class _Moved(dict[int, set[bytes]]):
    """Hinted chunks that jobs of a request moved, by the `Promises` of a tier."""


class Promises:
    """Leases that the hints of requests ask a tier for, and the tokens that it moved under them.

    Args:
        name: Returns the name of a chunk's frame.
        group: Number of the layer group whose tokens are counted.
        tokens: Tokens of a chunk.

    Attributes:
        tokens: Tokens "created" and "read" under hints; "dropped" spans of hints.
    """

    def __init__(self, name: Callable[[bytes], bytes], group: int, tokens: int) -> None:
        self._name, self._group, self._tokens = name, group, tokens
        self._jobs: dict[int, dict[bytes, Lease]] = {}
        self.tokens: Counter[str] = Counter()

    def of_job(self, job: Any) -> dict[bytes, Lease]:
        """Return the leases of a job's frames."""
        if leases := leases_in(job.req_context, job.keys):
            self._jobs[job.job_id] = leases
            moved = job.req_context.get_state(_Moved) or _Moved()
            moved.setdefault(id(self), set()).update(leases)
            job.req_context.set_state(moved)
        return self._named(leases)

    def moved(self, job: int, good: Iterable[bytes], what: str) -> None:
        """Count the tokens of a job's good chunks."""
        hinted = self._jobs.pop(job, {}).keys() & set(good)
        self.tokens[what] += self._tokens * sum(group_of(key) == self._group for key in hinted)

    def remaining(self, req_context: Any) -> dict[bytes, Lease]:
        """Return the leases of a finished request's frames that no job of it moved."""
        self.tokens["dropped"] += hint_in(req_context).dropped
        moved = (req_context.get_state(_Moved) or _Moved()).get(id(self), ())
        left = [key for key in ends_of(req_context) if key not in moved]
        return self._named(leases_in(req_context, left))

    def _named(self, leases: Mapping[bytes, Lease]) -> dict[bytes, Lease]:
        return {self._name(key): lease for key, lease in leases.items()}


class CacheRecorder:
    """Recorder of the chunks of requests, those in vLLM that its KV events leave out among them.

    Args:
        path: A new file; "" records nothing.
        group: Number of the layer group whose chunks are recorded.
        tokens: Tokens of a chunk.
    """

    def __init__(self, path: str, group: int, tokens: int) -> None:
        self._writer = Writer(path, block_tokens=tokens) if path else None
        self._group, self._tokens = group, tokens
        self._open: dict[str, tuple[int, Any, int | None]] = {}

    def record_arrival(self, context: Any) -> None:
        """Record the time of a request's arrival."""
        if self._writer is not None:
            self._open.setdefault(context.req_id, (time.monotonic_ns(), context, None))

    def record_schedule(self, requests: Iterable[str]) -> None:
        """Count the known chunks of requests as their prompt, and later ones as their answer."""
        for request in requests:
            begun_ns, context, prompt = self._open.get(request, (0, None, 0))
            if prompt is None:
                self._open[request] = begun_ns, context, len(self._chunks(context))

    def record_end(self, context: Any) -> None:
        """Write a request that is over."""
        begun_ns, _, prompt = self._open.pop(context.req_id, (0, None, 0))
        chain, tokens = self._chunks(context), self._tokens
        if self._writer is None or not begun_ns or not chain:
            return
        said: dict[str, Any] = {"tenant": tenant_of(context).encode()}
        n = len(chain) if prompt is None else min(prompt, len(chain))
        said |= {"input_tokens": n * tokens, "output_tokens": (len(chain) - n) * tokens}
        ids = b"".join(hashlib.sha256(key).digest()[:16] for key in chain)
        try:
            self._writer.request(begun_ns, ids, **said)
        except OSError as error:  # a full disk must not stop serving
            _log.warning("the recording %s ends here: %s", self._writer.path, error)
            self.close()

    def close(self) -> None:
        """Write the remaining requests and close the file. Safe to call again."""
        writer, self._writer = self._writer, None
        with suppress(OSError, ValueError):  # the last requests could not be written
            if writer is not None:
                writer.close()

    def _chunks(self, req_context: Any) -> list[bytes]:
        return chains_of(ends_of(req_context)).get(self._group, [])


class FlowKVCachePolicy(CachePolicy):
    """Eviction policy of vLLM's CPU cache, by a policy of FlowKV.

    vLLM passes nothing but the capacity, so the policy's name is in the name of a subclass, which
    `flowkv.connect.vllm` makes on demand: `flowkv_auto`, `flowkv_lru`, `flowkv_cost_aware`, ...
    """

    policy_name = "auto"
    clock_ns = staticmethod(time.monotonic_ns)

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        self._policy = KeyedPolicy(warming(self.policy_name))
        self._chunks: dict[bytes, Any] = {}
        self._above: dict[bytes, bytes] = {}
        self._leases: dict[bytes, Lease] = {}
        self._counted: dict[str, set[bytes]] = {}  # chunks that requests under way have used
        self._new: list[bytes] = []  # vLLM inserts one by one; the policy gets all at once
        self._now_ns = self.clock_ns()

    def get(self, key: bytes) -> Any:
        """Return a chunk, or None."""
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any) -> None:
        """Insert a chunk; it is not evictable until vLLM marks it so."""
        self._chunks[key] = chunk
        self._new.append(key)
        if chunk.ref_cnt == 0:
            self.mark_evictable(key)

    def remove(self, key: bytes) -> None:
        """Remove a chunk after its store failed."""
        del self._chunks[key]
        self._book.unpin([key])
        self._book.remove([key])

    def mark_evictable(self, key: bytes) -> None:
        """Unpin a chunk that is no longer in use."""
        self._book.unpin([key])

    def mark_non_evictable(self, key: bytes) -> None:
        """Pin a chunk that is in use."""
        self._book.pin([key])

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Record the use of chunks by a request, once for each request."""
        counted = self._counted.setdefault(req_context.req_id, set())
        new = [key for key in keys if key not in counted]
        counted.update(new)
        self._now_ns = self.clock_ns()
        self._book.access(self._now_ns, new)
        self._book.retain(self._now_ns, leases_in(req_context, new))

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Prepare the insertion of chunks: chunks evicted recently teach the policy.

        The chunks above them count as used, since chunks are inserted below recently used ones.
        """
        keys, positions, ends = list(keys), ends_of(req_context), dict[int, int]()
        for key in keys:
            ends[group_of(key)] = max(ends.get(group_of(key), 0), positions.get(key, 0))
        chains = chains_of(positions)
        for group, end in ends.items():
            found = (key for key in chains.get(group, ()) if positions[key] <= end)
            self.touch(found, req_context)
        self._above, self._leases = parents_of(positions), leases_in(req_context, keys)

    def on_request_finished(
        self, key_groups: Sequence[Sequence[bytes]], insertion_only_keys: set[bytes],
        reused_keys: set[bytes], req_context: Any,
    ) -> None:  # fmt: skip
        """Record the use of reused chunks; inserted ones were counted at insertion."""
        for keys in key_groups:
            self.touch((key for key in keys if key in reused_keys), req_context)
        here = (key for key in leases_in(req_context) if key in self._chunks)
        self.touch((key for key in here if key not in insertion_only_keys), req_context)
        self._counted.pop(req_context.req_id, None)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Evict exactly `n` chunks; otherwise return None, and change nothing."""
        if not n:
            return []
        victims = self._book.evict(self.clock_ns(), n, protected)
        return None if victims is None else [(key, self._chunks.pop(key)) for key in victims]

    @property
    def _book(self) -> KeyedPolicy:
        """Return the policy, after the insertion of new chunks."""
        if self._new:
            new, self._new = self._new, []
            for lease, run in groupby(new, lambda key: self._leases.get(key, "")):
                keys = list(run)
                above = [self._above.pop(key, b"") for key in keys]
                self._policy.insert(self._now_ns, keys, above, lease=lease)
            self._policy.pin(new)
        return self._policy
