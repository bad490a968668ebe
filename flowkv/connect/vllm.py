"""FlowKV inside vLLM, by configuration: a tier below its CPU cache, and policies in that cache.

`FlowKVTier` is a secondary tier of vLLM's `TieringOffloadingSpec`: chunks that vLLM offloads are
stored on the places of a `Keeper`, verified before vLLM reads them, and found again by later
processes. `flowkv_auto`, `flowkv_lfu_ttl`, ... are policies for `eviction_policy`: any name of
FlowKV's catalogue. See docs/guides/vllm.md. Importing this module imports vLLM.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowkv.connect.door import Announced, Jobs, check_version, raw_page, untested
from flowkv.connect.identity import identify
from flowkv.core.errors import ConfigError, experimental
from flowkv.core.geometry import COLD
from flowkv.core.keys import ROOT, tenant_salt
from flowkv.policy import CATALOGUE
from flowkv.residency.keeper import open_keeper
from flowkv.tiers.base import Load, Store

TESTED = "0.32"
"""The version of vLLM that this connector was tested with."""

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
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
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
    from vllm.version import __version__ as vllm_version

    from flowkv.connect import vllm_cache
    from flowkv.connect.vllm_cache import FlowKVCachePolicy, ends_of, group_of
    from flowkv.connect.vllm_rows import code_rows, describe
except ImportError as error:
    raise untested("vLLM", TESTED, error) from error

experimental(__name__, "vLLM changes the interfaces below it with its own releases")

__all__ = ["FlowKVCachePolicy", "FlowKVTier"]

_GRANULE = 4096
_PAUSE_S = 2e-4
_ANSWERS = "vllm:flowkv_answers"
_USED = "vllm:flowkv_used_bytes"
_DECLINED = "vllm:flowkv_declined_requests"
_HINTED = "vllm:flowkv_hinted_tokens"

check_version("vLLM", "tier", vllm_version, TESTED)


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
        codec: "kvt" codes chunks at one to two bits a value, with loss.
        basis: File of the basis of "kvt", of `flowkv calibrate`.
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
        codec: str = "raw", basis: str = "", enable_kv_events: bool = False, record: str = "",
        locality: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._lasting = _require_lasting_hashes()
        self.locality = Locality(locality) if locality else None
        spec, config = offloading_spec, offloading_spec.config
        made_by = describe(spec, self.block_size_bytes)
        self._coded = code_rows(codec, basis, spec, self.block_size_bytes)
        made_by |= self._coded.named if self._coded else {}
        model = str(made_by.pop("model_name"))
        self._namespace, self._layout = identify(model, made_by, weights, revision)
        layers = sum(len(group.layer_names) for group in config.groups) or 1
        stripe, rest = divmod(self.block_size_bytes, layers)  # one a layer if possible
        self._stripe = self.block_size_bytes if rest or stripe % _GRANULE else stripe
        numbers = [getattr(group, "group_id", i) for i, group in enumerate(config.groups)]
        sizes = [tokens * spec.blocks_per_chunk for tokens in spec.tokens_per_block]
        self._tokens = dict(zip(numbers, sizes, strict=True))
        self._rank, self._fidelity = (config.parallel.rank, config.parallel.world_size), 0
        if self._coded:  # for all ranks, and with the loss of chunks before, coded or not
            self._rank, self._fidelity = (0, 1), COLD
        self._memory = primary_kv_view.cast("B")
        self._deadline_s, self._gate = load_deadline_s, gate
        self._secret = bytes.fromhex(options.get("secret", ""))
        self._done: list[Any] = []
        self._worth: dict[str, bool] = {}  # by request with a hit: whether loading pays
        self._scheduled_s: dict[str, float] = {}  # by request that has stored nothing yet
        self._told: Counter[tuple[str, str]] = Counter()
        self._declined = 0
        events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._tells, self._events = bool(events), list[Any]()
        first = next(iter(self._tokens.items()))
        self._recorder = vllm_cache.CacheRecorder(record, *first)
        self._hints = vllm_cache.Promises(self._name, *first)
        places = [places] if isinstance(places, str) else places
        over = self._coded.over(self._layout) if self._coded else None
        self.keeper = open_keeper(*places, over=over, **options)
        self._keys = Announced[bytes](self.keeper)  # keys of chunks in stored events, by name
        if events:
            self.keeper.on_evicted = self._keys.departed
        self._caller = self.keeper.caller()
        self._jobs = Jobs(self._caller)

    # ---- requests

    def on_new_request(self, req_context: Any) -> Any:
        """Return vLLM's default context: chunks are offloaded as they come."""
        if not self._lasting:  # vLLM chooses its hashes after making its tiers
            self._lasting = _require_lasting_hashes()
        self._recorder.record_arrival(req_context)
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
        ahead = {self._name(k): p for k, p in ends_of(req_context).items() if p >= first}
        said = self._caller.lookup(list(ahead), req_context.req_id)
        here = [name for name, there in zip(ahead, said, strict=True) if there]
        last = max((ahead[name] for name in here), default=first)
        tokens = last - first + self._tokens[group_of(key)]
        return self.keeper.worth(here, self.block_size_bytes, tokens)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Record the use of chunks in vLLM's own memory."""
        self._caller.touch([self._name(key) for key in keys])

    def on_request_finished(self, req_context: Any) -> None:
        """Release looked-up chunks, and apply a hint to those used from vLLM's own memory."""
        if leases := self._hints.remaining(req_context):
            self._caller.touch(filter(self.keeper.knows, leases), leases)
        self._caller.release(req_context.req_id)
        self._worth.pop(req_context.req_id, None)
        self._scheduled_s.pop(req_context.req_id, None)
        self._recorder.record_end(req_context)

    def on_schedule_end(self, context: Any) -> None:
        """Record the time at which requests begin to be computed."""
        now_s = time.monotonic()
        self._recorder.record_schedule(context.new_req_ids)
        self._scheduled_s.update((request, now_s) for request in context.new_req_ids)

    def _computed(self, keys: Sequence[bytes], req_context: Any) -> None:
        """Measure the rate of computing by the first chunks that a request stores."""
        begun_s = self._scheduled_s.pop(req_context.req_id, None)
        spots = [req_context.get_offload_key_position(key) for key in keys]
        if begun_s is None or None in spots or not keys:
            return
        tokens = max(spots) - min(spots) + self._tokens[group_of(keys[0])]
        self.keeper.gate.computed(tokens, time.monotonic() - begun_s)

    # ---- transfers

    def submit_load(self, job_metadata: Any) -> None:
        """Start to fill rows."""
        request = job_metadata.req_context.req_id
        self._scheduled_s.pop(request, None)
        how = self._layout, self._fidelity
        loads = [Load(self._name(key), row, *how) for key, row in self._rows(job_metadata)]
        self._start(job_metadata, loads, loads=True, deadline_s=self._deadline_s, request=request)

    def submit_store(self, job_metadata: Any) -> None:
        """Start to store rows, which vLLM may reuse once the job is finished."""
        context = job_metadata.req_context
        self._computed(list(job_metadata.keys), context)
        above, tenant = vllm_cache.parents_of(ends_of(context)), vllm_cache.tenant_of(context)
        salt, stripe = tenant_salt(tenant, self._secret) if tenant else ROOT, self._stripe
        stores = []
        for key, row in self._rows(job_metadata):
            parent, group = self._name(above[key]) if key in above else ROOT, group_of(key)
            said = self._layout, parent, self._namespace, group, self._tokens[group], stripe, salt
            info = raw_page(*said, *self._rank)._replace(fidelity=self._fidelity)
            stores.append(Store(self._name(key), info, row.toreadonly()))
            if self._coded:
                self._coded.storing(self._name(key), context.get_offload_key_position(key))
        self._start(job_metadata, stores, loads=False)

    def _start(self, job: Any, items: Sequence[Any], **how: Any) -> None:
        how["leases"] = self._hints.of_job(job)
        self._jobs.start_job(items, job.keys, job.job_id, **how)

    def _rows(self, job: Any) -> Iterator[tuple[bytes, memoryview]]:
        """Yield each key of a job with its row."""
        size = self.block_size_bytes
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            yield key, self._memory[int(chunk) * size :][:size]

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
        for job in self._jobs.finished(timeout_s):
            good = [job.keys[at] for at in job.sizes]
            success, seconds = len(good) == len(job.keys), time.monotonic() - job.begun_s
            n_bytes, keys = sum(job.sizes.values()), None if success else tuple(good) or None
            self._done.append(JobResult(job.number, success, keys, seconds, n_bytes))
            self._hints.moved(job.number, good, "read" if job.loads else "created")
            if self._coded and not job.loads:
                self._coded.stored(map(self._name, job.keys))
            if self._tells and not job.loads:
                new = [key for key in good if self._keys.arrived(self._name(key), key)]
                self._tell(new, removed=False)

    def shutdown(self) -> None:
        """End all transfers and close the places."""
        self.keeper.close()
        self._drain()
        self._memory.release()
        self._recorder.close()

    def _name(self, key: bytes) -> bytes:
        return hashlib.sha256(self._namespace + key).digest()

    # ---- events and statistics

    def take_events(self) -> Iterable[Any]:
        """Return events of chunks stored and evicted since the last call, if vLLM enables them."""
        self._tell(self._keys.take_gone(), removed=True)
        events, self._events = self._events, []
        return events

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        told = {"medium": self.medium, "removed": removed, "locality": self.locality}
        whose = {"ownership": self.tier_type, "removal_expected": True}
        if keys:
            self._events.append(OffloadingEvent(keys, **told, **whose))

    @classmethod
    def build_metric_definitions(cls, tier_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the definitions of the metrics in `get_stats`, for vLLM's Prometheus."""
        answers = "Loads and stores of FlowKV by how they ended, such as hit or miss:digest."
        declined = "Requests with loads that would have taken longer than computing."
        hinted = "Tokens created or read under hints; spans of hints that were dropped."
        return {
            _ANSWERS: OffloadingCounterMetadata(answers, ("tier", "answer")),
            _DECLINED: OffloadingCounterMetadata(declined, ("tier",)),
            _HINTED: OffloadingCounterMetadata(hinted, ("tier", "what")),
            _USED: OffloadingGaugeMetadata("Bytes that a place of FlowKV holds.", ("place",)),
        }

    def get_stats(self) -> Any:
        """Return the counts since the last call."""
        stats, now = OffloadingConnectorStats(), Counter[tuple[str, str]]()
        now.update({(_ANSWERS, what): n for what, n in list(self.keeper.counts.items())})
        now.update({(_HINTED, what): n for what, n in self._hints.tokens.items()})
        now[_DECLINED, ""] = self._declined
        for (name, what), n in (now - self._told).items():
            stats.increase_counter(name, n, (self.tier_type, what) if what else (self.tier_type,))
        self._told = now
        for level in self.keeper.levels:
            stats.set_gauge(_USED, level.tier.used_bytes(), (level.tier.name,))
        return stats


def __getattr__(name: str) -> Any:
    policy = name.removeprefix("flowkv_").replace("_", "-")
    if not name.startswith("flowkv_") or policy not in CATALOGUE:
        raise AttributeError(f"module {__name__} has no {name}")
    return type(name, (FlowKVCachePolicy,), {"policy_name": policy})
