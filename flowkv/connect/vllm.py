"""FlowKV inside vLLM, by configuration: a tier below its CPU cache, and policies in that cache.

`FlowKVTier` is a secondary tier of vLLM's `TieringOffloadingSpec`: chunks that vLLM offloads are
stored on the places of a `Keeper`, verified before vLLM reads them, and found again by later
processes. `flowkv_auto`, `flowkv_lfu_ttl`, ... are policies for `eviction_policy`: any name of
FlowKV's catalogue. See docs/guides/vllm.md. Importing this module imports vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from flowkv.connect.door import Announced, Transfer, check_version, raw_page, untested
from flowkv.connect.identity import identify
from flowkv.core.errors import ConfigError, StateError, experimental
from flowkv.core.keys import ROOT, tenant_salt
from flowkv.observe.recording import Writer
from flowkv.policy import CATALOGUE
from flowkv.policy.warming import warming
from flowkv.residency.keeper import open_keeper
from flowkv.residency.keyed import KeyedPolicy
from flowkv.tiers.base import FrameInfo, Load, Store

TESTED = "0.32"
"""The version of vLLM that this connector was tested with."""

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.platforms import current_platform
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
    from vllm.version import __version__ as vllm_version
except ImportError as error:
    raise untested("vLLM", TESTED, error) from error

experimental(__name__, "vLLM changes the interfaces below it with its own releases")

_log = logging.getLogger("flowkv")
_GRANULE = 4096
_PAUSE_S = 2e-4
_ANSWERS = "vllm:flowkv_answers"
_USED = "vllm:flowkv_used_bytes"
_DECLINED = "vllm:flowkv_declined_requests"

check_version("vLLM", "tier", vllm_version, TESTED)


# ---- identity of the bytes


def _require_lasting_hashes() -> bool:
    """Check that block hashes are the same in every process; return False if not chosen yet.

    Raises:
        ConfigError: The hashes depend on a random seed, or on pickle.
    """
    seed = getattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    if seed is not None and sha256_cbor(seed) != kv_cache_utils.NONE_HASH:
        raise ConfigError(
            "vLLM names blocks by hashes that differ between processes or versions",
            'Set prefix_caching_hash_algo="sha256_cbor"',
        )
    return seed is not None


def describe(spec: Any, row_bytes: int) -> dict[str, Any]:
    """Return all settings but weights and tokens that the bytes of a row depend on."""
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk)
    made_by = {
        **mapper.get_run_config(),  # groups, layers, dtype, parallel sizes, canonical format
        "layout": spec.config.kv_cache_layout,
        "row_bytes": row_bytes,
        "device": str(current_platform.device_name),
    }
    if current_platform.is_cpu():  # the layout of keys depends on the instruction set
        import torch

        amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
        made_by["instructions"] = [platform.machine(), amx, avx512]
    return made_by


# ---- the tier


class _Accesses:
    """Recorder of the chunks of requests, including chunks in vLLM that its KV events leave out."""

    def __init__(self, path: str, group: int, tokens: int) -> None:
        self.writer, self._group = Writer(path, block_tokens=tokens), group
        self._open: dict[str, tuple[int, Any, int | None]] = {}
        self._failed = False

    def comes(self, context: Any) -> None:
        self._open.setdefault(context.req_id, (time.time_ns(), context, None))

    def begin(self, requests: Iterable[str]) -> None:
        """Count the known chunks of requests as their prompt, and later ones as their answer."""
        for request in requests:
            begun_ns, context, prompt = self._open.get(request, (0, None, 0))
            if prompt is None:
                self._open[request] = begun_ns, context, len(self._chunks(context))

    def goes(self, context: Any) -> None:
        begun_ns, _, prompt = self._open.pop(context.req_id, (0, None, 0))
        chain, tokens = self._chunks(context), self.writer.block_tokens
        if self._failed or not begun_ns or not chain:
            return
        prompt = len(chain) if prompt is None else min(prompt, len(chain))
        tenant = (context.kv_transfer_params or {}).get("flowkv_tenant")
        try:
            self.writer.request(
                begun_ns,
                b"".join(hashlib.sha256(key).digest()[:16] for key in chain),
                input_tokens=prompt * tokens,
                output_tokens=(len(chain) - prompt) * tokens,
                tenant=str(tenant or "").encode(),
            )
        except (OSError, StateError) as error:  # a full disk must not stop serving
            _log.warning("the recording %s ends here: %s", self.writer.path, error)
            self._failed = True

    def close(self) -> None:
        with suppress(OSError, ValueError):  # the last requests could not be written
            self.writer.close()

    def _chunks(self, req_context: Any) -> list[bytes]:
        return _chains(_positions(req_context)).get(self._group, [])


class FlowKVTier(SecondaryTierManager):
    """Tier of vLLM's over a keeper. Only the constructor, `drain_jobs` and `shutdown` wait.

    Args:
        offloading_spec: vLLM's.
        primary_kv_view: Rows of vLLM's CPU cache.
        tier_type: vLLM's name of the tier.
        backpressure_detector: vLLM's.
        places: "disk:/nvme/kv:200GiB", or several, fastest first.
        weights: Name of the weights; default a digest of their files.
        revision: Revision of the model, if the weights alone do not identify it.
        load_deadline_s: A load that takes longer is a miss.
        gate: Whether to decline requests that are faster to compute than to load.
        enable_kv_events: Whether stored and evicted chunks become KV events of vLLM.
        record: New file that requests are recorded in for `flowkv sim replay`, as salted hashes.
        locality: "LOCAL" or "REMOTE", for `kv_load_tiers` of requests.
        **options: See `open_keeper`: policy, quotas, durability, integrity, secret, lossless.

    Raises:
        ConfigError: Block hashes vary, weights cannot be identified, or an option is invalid.
        StoreError: A place cannot be used.
    """

    medium = Medium.STORAGE

    def __init__(  # noqa: PLR0913 (named by vLLM's configuration)
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None, *, places: str | Sequence[str], weights: str = "",
        revision: str = "", load_deadline_s: float = 5.0, gate: bool = True,
        enable_kv_events: bool = False, record: str = "", locality: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._lasting = _require_lasting_hashes()
        self.locality = Locality(locality) if locality else None
        spec, config = offloading_spec, offloading_spec.config
        made_by = describe(spec, self.block_size_bytes)
        model = str(made_by.pop("model_name"))
        self._namespace, self._layout = identify(model, made_by, weights, revision)
        layers = sum(len(group.layer_names) for group in config.groups) or 1
        stripe, rest = divmod(self.block_size_bytes, layers)  # one a layer if possible
        self._stripe = self.block_size_bytes if rest or stripe % _GRANULE else stripe
        numbers = [getattr(group, "group_id", i) for i, group in enumerate(config.groups)]
        sizes = [tokens * spec.blocks_per_chunk for tokens in spec.tokens_per_block]
        self._tokens = dict(zip(numbers, sizes, strict=True))
        self._rank = config.parallel.rank, config.parallel.world_size
        self._rows = primary_kv_view.cast("B")
        self._deadline_s, self._gate = load_deadline_s, gate
        self._secret = bytes.fromhex(options.get("secret", ""))
        self._jobs: dict[int, Transfer] = {}
        self._done: list[Any] = []
        self._worth: dict[str, bool] = {}  # by request with a hit: whether loading pays
        self._scheduled_s: dict[str, float] = {}  # by request that has stored nothing yet
        self._told: Counter[tuple[str, str]] = Counter()
        self._declined = 0
        events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._tells, self._events = bool(events), list[Any]()
        self._accesses = _Accesses(record, *next(iter(self._tokens.items()))) if record else None
        asked = [places] if isinstance(places, str) else places
        self.keeper = open_keeper(*asked, **options)
        self._keys = Announced[bytes](self.keeper)  # keys of chunks in stored events, by name
        if events:
            self.keeper.on_evicted = self._keys.departed
        self._caller = self.keeper.caller()

    # ---- requests

    def on_new_request(self, req_context: Any) -> Any:
        """Return vLLM's default context: chunks are offloaded as they come."""
        if not self._lasting:  # vLLM chooses its hashes after making its tiers
            self._lasting = _require_lasting_hashes()
        if self._accesses is not None:
            self._accesses.comes(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return HIT, MISS, or RETRY while a remote tier is asked; MISS after a failed load."""
        request = req_context.req_id
        (there,) = self._caller.lookup([self._name(key)], request)
        if there is None:
            return LookupResult.RETRY
        if not there:
            return LookupResult.MISS
        if self._gate and request not in self._worth:
            self._worth[request] = self._pays(key, req_context)
            self._declined += not self._worth[request]
        return LookupResult.HIT if self._worth.get(request, True) else LookupResult.MISS

    def _pays(self, key: bytes, req_context: Any) -> bool:
        """Return whether loading a request's stored chunks, from a key on, beats computing them."""
        first = req_context.get_offload_key_position(key)
        if first is None:
            return True
        ahead = {k: p for k, p in _positions(req_context).items() if p >= first}
        names = {self._name(k): p for k, p in ahead.items()}
        said = self._caller.lookup(list(names), req_context.req_id)
        here = [name for name, there in zip(names, said, strict=True) if there]
        last = max((names[name] for name in here), default=first)
        tokens = last - first + self._tokens[_group(key)]
        return self.keeper.worth(here, self.block_size_bytes, tokens)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Record the use of chunks in vLLM's own memory."""
        self._caller.touch([self._name(key) for key in keys])

    def on_request_finished(self, req_context: Any) -> None:
        """Release the chunks that the request looked up, and forget its failed loads."""
        self._caller.release(req_context.req_id)
        self._worth.pop(req_context.req_id, None)
        self._scheduled_s.pop(req_context.req_id, None)
        if self._accesses is not None:
            self._accesses.goes(req_context)

    def on_schedule_end(self, context: Any) -> None:
        """Record the time at which requests begin to be computed."""
        now_s = time.monotonic()
        if self._accesses is not None:
            self._accesses.begin(context.new_req_ids)
        self._scheduled_s.update((request, now_s) for request in context.new_req_ids)

    def _computed(self, keys: Sequence[bytes], req_context: Any) -> None:
        """Measure the rate of computing by the first chunks that a request stores."""
        begun_s = self._scheduled_s.pop(req_context.req_id, None)
        spots = [req_context.get_offload_key_position(key) for key in keys]
        if begun_s is None or None in spots or not keys:
            return
        tokens = max(spots) - min(spots) + self._tokens[_group(keys[0])]
        self.keeper.gate.computed(tokens, time.monotonic() - begun_s)

    # ---- transfers

    def submit_load(self, job_metadata: Any) -> None:
        """Start to fill rows."""
        keys = list(job_metadata.keys)
        self._scheduled_s.pop(job_metadata.req_context.req_id, None)
        loads = [
            Load(self._name(key), self._row(chunk), self._layout)
            for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True)
        ]
        how = {"deadline_s": self._deadline_s, "request": job_metadata.req_context.req_id}
        number = self._caller.submit_load(loads, **how)
        self._jobs[number] = Transfer(job_metadata.job_id, keys, loads=job_metadata.is_promotion)

    def submit_store(self, job_metadata: Any) -> None:
        """Start to store rows, which vLLM may reuse once the job is finished."""
        context, keys = job_metadata.req_context, list(job_metadata.keys)
        self._computed(keys, context)
        above = _parents(_positions(context))
        tenant = (context.kv_transfer_params or {}).get("flowkv_tenant")
        salt = tenant_salt(str(tenant), self._secret) if tenant else bytes(32)
        stores = [
            Store(
                self._name(key),
                self._info(_group(key), self._name(above[key]) if key in above else ROOT, salt),
                self._row(chunk).toreadonly(),
            )
            for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True)
        ]
        number = self._caller.submit_store(stores)
        self._jobs[number] = Transfer(job_metadata.job_id, keys, loads=job_metadata.is_promotion)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that are over, each once."""
        # vLLM polls in a loop, and polling without a pause keeps the interpreter from the loading
        # threads: each of their turns would wait for Python's switch interval of 5 ms.
        self._collect(_PAUSE_S if any(job.loads for job in self._jobs.values()) else 0.0)
        done, self._done = self._done, []
        return done

    def drain_jobs(self) -> None:
        """Wait until no row is in use, and start a new namespace.

        vLLM calls this when its cache is reset, after which its weights may have changed: chunks
        stored later have names that no other process has, and chunks stored before are not found
        here.
        """
        self._drain()
        self._namespace = hashlib.sha256(self._namespace + os.urandom(16)).digest()

    def _drain(self) -> None:
        while self._jobs:  # every load and store has a deadline
            self._collect(0.1)

    def _collect(self, timeout_s: float) -> None:
        for answer in self._caller.poll(timeout_s):
            job = self._jobs[answer.job]
            job.answered(answer)
            if job.left:
                continue
            del self._jobs[answer.job]
            good = [job.keys[at] for at in job.sizes]
            success = len(good) == len(job.keys)
            self._done.append(
                JobResult(
                    job.number,
                    success=success,
                    successful_keys=None if success else tuple(good) or None,
                    transfer_time=time.monotonic() - job.begun_s,
                    transfer_bytes=sum(job.sizes.values()),
                )
            )
            if self._tells and not job.loads:
                names = [(self._name(key), key) for key in good]
                there = {name: key for name, key in names if self.keeper.knows(name)}
                self._keys.update(there)
                if there:
                    self._tell(list(there.values()), removed=False)

    def shutdown(self) -> None:
        """End all transfers and close the places."""
        self.keeper.close()
        self._drain()
        self._rows.release()
        if self._accesses is not None:
            self._accesses.close()

    def _name(self, key: bytes) -> bytes:
        return hashlib.sha256(self._namespace + key).digest()

    def _row(self, chunk: int) -> memoryview:
        start = int(chunk) * self.block_size_bytes
        return self._rows[start : start + self.block_size_bytes]

    def _info(self, group: int, parent: bytes, salt: bytes) -> FrameInfo:
        tokens, stripe = self._tokens[group], self._stripe
        said = self._layout, parent, self._namespace, group, tokens, stripe, salt
        return raw_page(*said, *self._rank)

    # ---- events and statistics

    def take_events(self) -> Iterable[Any]:
        """Return events of chunks stored and evicted since the last call, if vLLM enables them."""
        if gone := self._keys.take_gone():
            self._tell(gone, removed=True)
        events, self._events = self._events, []
        return events

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        told = {"medium": self.medium, "removed": removed, "locality": self.locality}
        whose = {"ownership": self.tier_type, "removal_expected": True}
        self._events.append(OffloadingEvent(keys, **told, **whose))

    @classmethod
    def build_metric_definitions(cls, tier_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the definitions of the metrics in `get_stats`, for vLLM's Prometheus."""
        answers = "Loads and stores of FlowKV by how they ended, such as hit or miss:digest."
        declined = "Requests with loads that would have taken longer than computing."
        return {
            _ANSWERS: OffloadingCounterMetadata(answers, ("tier", "answer")),
            _DECLINED: OffloadingCounterMetadata(declined, ("tier",)),
            _USED: OffloadingGaugeMetadata("Bytes that a place of FlowKV holds.", ("place",)),
        }

    def get_stats(self) -> Any:
        """Return the counts since the last call."""
        stats, now = OffloadingConnectorStats(), Counter[tuple[str, str]]()
        now.update({(_ANSWERS, what): n for what, n in list(self.keeper.counts.items())})
        now[_DECLINED, ""] = self._declined
        for (name, what), n in (now - self._told).items():
            stats.increase_counter(name, n, (self.tier_type, what) if what else (self.tier_type,))
        self._told = now
        for level in self.keeper.levels:
            stats.set_gauge(_USED, level.tier.used_bytes(), (level.tier.name,))
        return stats


def _group(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")


def _positions(req_context: Any) -> dict[bytes, int]:
    """Return the end of each of a request's chunks in tokens, from a private attribute of vLLM."""
    found: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    return found


def _chains(positions: Mapping[bytes, int]) -> dict[int, list[bytes]]:
    """Return a request's chunks by their groups, root to leaf."""
    found: dict[int, list[bytes]] = {}
    for key in sorted(positions, key=positions.__getitem__):
        found.setdefault(_group(key), []).append(key)
    return found


def _parents(positions: Mapping[bytes, int]) -> dict[bytes, bytes]:
    """Return the chunk before each one in its group."""
    chains = _chains(positions).values()
    return {key: above for chain in chains for above, key in pairwise(chain)}


# ---- policies


class FlowKVCachePolicy(CachePolicy):
    """Eviction policy of vLLM's CPU cache, by a policy of FlowKV.

    vLLM passes nothing but the capacity, so the policy's name is in the name of a subclass, which
    this module makes on demand: `flowkv_auto`, `flowkv_lru`, `flowkv_cost_aware`, ...
    """

    policy_name = "auto"
    clock_ns = staticmethod(time.monotonic_ns)

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        self._book = KeyedPolicy(warming(self.policy_name))
        self._chunks: dict[bytes, Any] = {}
        self._above: dict[bytes, bytes] = {}
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
        self._settle()
        del self._chunks[key]
        self._book.unpin([key])
        self._book.remove([key])

    def mark_evictable(self, key: bytes) -> None:
        """Unpin a chunk that is no longer in use."""
        self._settle()
        self._book.unpin([key])

    def mark_non_evictable(self, key: bytes) -> None:
        """Pin a chunk that is in use."""
        self._settle()
        self._book.pin([key])

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Record the use of chunks by a request, once for each request."""
        self._settle()
        counted = self._counted.setdefault(req_context.req_id, set())
        new = [key for key in keys if key not in counted]
        counted.update(new)
        self._now_ns = self.clock_ns()
        self._book.access(self._now_ns, new)

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Prepare the insertion of chunks: chunks evicted recently teach the policy.

        The chunks above them count as used, since chunks are inserted below recently used ones.
        """
        positions, ends = _positions(req_context), dict[int, int]()
        for key in keys:
            ends[_group(key)] = max(ends.get(_group(key), 0), positions.get(key, 0))
        chains = _chains(positions)
        for group, end in ends.items():
            found = (key for key in chains.get(group, ()) if positions[key] <= end)
            self.touch(found, req_context)
        self._above = _parents(positions)

    def on_request_finished(
        self, key_groups: Sequence[Sequence[bytes]], insertion_only_keys: set[bytes],
        reused_keys: set[bytes], req_context: Any,
    ) -> None:  # fmt: skip
        """Record the use of reused chunks; inserted ones were counted at insertion."""
        for keys in key_groups:
            self.touch((key for key in keys if key in reused_keys), req_context)
        self._counted.pop(req_context.req_id, None)

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Evict exactly `n` chunks; otherwise return None, and change nothing."""
        if not n:
            return []
        self._settle()
        victims = self._book.evict(self.clock_ns(), n, protected)
        return None if victims is None else [(key, self._chunks.pop(key)) for key in victims]

    def _settle(self) -> None:
        if self._new:
            new, self._new = self._new, []
            self._book.insert(self._now_ns, new, [self._above.pop(key, b"") for key in new])
            self._book.pin(new)


def __getattr__(name: str) -> Any:
    policy = name.removeprefix("flowkv_").replace("_", "-")
    if not name.startswith("flowkv_") or policy not in CATALOGUE:
        raise AttributeError(f"module {__name__} has no {name}")
    return type(name, (FlowKVCachePolicy,), {"policy_name": policy})
