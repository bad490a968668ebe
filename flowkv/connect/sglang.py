"""FlowKV inside SGLang, by configuration: a `dynamic` storage backend of HiCache.

Pages that SGLang backs up from host memory are stored on the places of a `Keeper`, verified before
SGLang reads them, and found again by later processes. See docs/guides/sglang.md. Importing this
module imports SGLang and torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from flowkv.connect import door
from flowkv.connect.identity import fingerprint, identify
from flowkv.connect.sglang_pool import HostPool, bytes_of
from flowkv.core.errors import ConfigError, experimental
from flowkv.core.keys import ROOT
from flowkv.residency.keeper import open_keeper
from flowkv.tiers.base import Load, Store

TESTED = "0.5"
"""The version of SGLang that this connector was tested with."""

try:
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        PoolHitPolicy,
        PoolName,
        PoolTransferResult,
    )
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.version import __version__ as sglang_version
except ImportError as error:
    raise door.untested("SGLang", TESTED, error) from error

experimental(__name__, "SGLang changes the interfaces below it with its own releases")

_log = logging.getLogger("flowkv")
_ASK_AGAIN_S = 0.002
_Move = Callable[[HostPool, list[str], torch.Tensor], list[bool]]
_USES = (
    "model_path revision speculative_draft_model_path speculative_draft_model_revision "
    "dtype quantization quantization_param_path kv_cache_dtype json_model_override_args model_impl "
    "load_format modelopt_quant custom_weight_loader qsa_indexer_dtype speculative_algorithm "
    "speculative_draft_kv_cache_dtype speculative_draft_model_quantization"
).split()
"""Arguments of SGLang's server that define the weights, and how they are used."""

door.check_version("SGLang", "storage", sglang_version, TESTED)


def _uses() -> dict[str, str]:
    """Return SGLang's server arguments that define the model; empty outside a server."""
    try:
        args = runtime_context.get_server_args()
    except (AttributeError, ValueError):
        return {}
    said = {name: getattr(args, name, None) for name in _USES}
    return {name: str(value) for name, value in said.items() if value is not None}


class FlowKVStorage(HiCacheStorage):
    """Storage of SGLang's HiCache over a keeper. Calls wait, for their deadline at most.

    Args:
        storage_config: SGLang's; its `extra_config["flowkv"]` may have
            places: "disk:/nvme/kv-{rank}:200GiB", or several, fastest first; "{rank}" becomes the
                rank of the process.
            model: Path of the model's files, if SGLang's name of the model is not that path.
            weights: Name of the weights, in place of a digest of their files.
            revision: Revision of the model, if the weights alone do not identify it.
            load_deadline_s: A load that takes longer is a miss.
            lookup_deadline_s: A look-up in a remote place that takes longer is a miss.
            And options of `open_keeper`: policy, durability, integrity, secret, lossless.
        kwargs: SGLang's.

    Attributes:
        keeper: The keeper of the frames.

    Raises:
        ConfigError: An option is missing or invalid, or the weights cannot be identified.
        StoreError: A place cannot be used.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        remedy = 'Set "flowkv": {"places": ["disk:/nvme/kv-{rank}:200GiB"]} beside "backend_name"'
        self._settings = said = door.Settings("storage", extra.get("flowkv") or {}, remedy)
        self._uses = _uses()
        path = self._uses.pop("model_path", storage_config.model_name or "")
        self._model = str(said.options.pop("model", path))
        self._weights = str(said.weights)
        if not self._weights:
            self._weights = fingerprint(self._model, self._uses.get("revision"))
            if draft := self._uses.get("speculative_draft_model_path"):
                of_draft = self._uses.get("speculative_draft_model_revision")
                self._weights += fingerprint(draft, of_draft)
        self._in_place = bool(extra.get("interface_v1", 0))
        self._of = storage_config
        self._rank = storage_config.tp_rank, storage_config.tp_size
        self.keeper = open_keeper(*self._places(said.places), **said.options)
        self._held = door.Holds(self.keeper.caller())  # until as many loads
        self._pools: dict[str, HostPool] = {}

    def _places(self, asked: Sequence[str]) -> list[str]:
        of, disks = self._of, [place for place in asked if place.startswith("disk:")]
        if disks and of.is_mla_model and of.tp_size > 1:
            raise ConfigError(
                "a directory serves one rank, but all ranks load pages that SGLang stores from one",
                'Use a place that all ranks reach: "redis://...", "s3://..."',
            )
        ranks = (of.tp_rank, of.pp_rank, of.attn_cp_rank, of.dp_rank)
        alone = of.tp_size * of.pp_size * of.attn_cp_size == 1 and not of.dp_rank
        for place in disks:
            if "{rank}" not in place and not alone:
                raise ConfigError(
                    f"{place!r} is one directory for several ranks, but only one can write there",
                    "Give each rank a directory of its own: disk:/nvme/kv-{rank}:200GiB",
                )
        return [place.replace("{rank}", "-".join(map(str, ranks))) for place in asked]

    # ---- identity of the bytes

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the host pool of K and V."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, str(PoolName.KV))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a host pool of another kind: states, windows, indices."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:  # K and V are registered already, for calls of v1
            self._register(host_pool, str(host_pool_name))

    def _register(self, host_pool: Any, name: str) -> None:
        of, revision = self._of, self._settings.revision
        pool = HostPool(host_pool, name, in_place=self._in_place)
        if "uint8" in str(getattr(host_pool, "dtype", "")) and not (self._uses or revision):
            raise ConfigError(
                "the cache has uint8 elements, and SGLang does not report their encoding",
                'Set "revision" to a value that changes with --kv-cache-dtype',
            )
        split = isinstance(host_pool, MHATokenToKVPoolHost) or name == PoolName.MAMBA
        shared = of.is_mla_model and not split  # every rank holds the same bytes
        said = {
            "engine": "sglang",
            "name": name,
            "ranks": [] if shared else [of.tp_rank, of.tp_size],
            "stages": [of.pp_rank, of.pp_size, of.attn_cp_rank, of.attn_cp_size],
            "shards": [of.dcp_rank, of.dcp_size],
            "uses": self._uses,
            **pool.said(),
        }
        pool.namespace, pool.layout = identify(self._model, said, self._weights, revision)
        self._pools[name] = pool

    def _pool(self, name: Any = PoolName.KV) -> HostPool:
        try:
            return self._pools[str(name)]
        except KeyError:
            raise ConfigError(
                f"SGLang has not registered the pool of {name} pages",
                "Report this with the versions of SGLang and FlowKV",
            ) from None

    # ---- look-ups

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are stored; these are held until they are loaded."""
        pool = self._pool()
        lookup = self._look_up(pool, keys)
        there = pool.whole(lookup.found)
        n = there.index(False) if False in there else len(there)
        lookup.release_found(n * len(pool.sizes))
        return n

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Return the prefixes that can be restored: the pages that each pool needs are stored.

        Pools of policy "block_groups" are not reported, and gate nothing.
        """
        n_pages = self.batch_exists(keys)
        found = {PoolName.KV: n_pages} if n_pages else {}
        restorable = set(range(1, n_pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS or not restorable:
                continue
            pool = self._pool(transfer.name)
            lookup = self._look_up(pool, keys[:n_pages])
            there = pool.whole(lookup.found)
            lookup.release_found()  # which pages will be loaded is unknown
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            window = max(1, len(transfer.keys or ())) if trailing else n_pages
            ends = [n for n in range(1, n_pages + 1) if all(there[max(0, n - window) : n])]
            if ends:
                found[transfer.name] = ends[-1]
            restorable &= set(ends)
        n_usable = max(restorable, default=0)
        self._held.release_frames(self._pool().frame_names(keys[n_usable:n_pages]))
        return PoolTransferResult(n_usable, found, sorted(restorable))

    def _look_up(self, pool: HostPool, keys: Sequence[str]) -> door.Lookup:
        limit_s = self._settings.lookup_deadline_s
        lookup = door.Lookup(self._held, pool.frame_names(keys), limit_s)
        while not lookup.is_over():
            time.sleep(_ASK_AGAIN_S)
        return lookup

    # ---- transfers

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Fill pages of K and V; return for each whether it was filled."""
        return self._load(self._pool(), keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of K and V; return for each whether it is stored."""
        before = list(getattr(extra_info, "prefix_keys", None) or ())[-1:]
        return self._store(self._pool(), keys, self._pool().runs(host_indices), before)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Fill pages of several pools; return for each whether it was filled."""
        return self._each(transfers, self._load)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools; return for each whether it is stored."""
        return self._each(transfers, lambda p, keys, at: self._store(p, keys, p.runs(at)))

    def _each(self, transfers: Iterable[Any], move: _Move) -> dict[str, list[bool]]:
        done = {}
        for transfer in transfers:
            pool, keys = self._pool(transfer.name), transfer.keys or []
            indices = transfer.host_indices
            if indices is None or indices.numel() != len(keys) * pool.page_size:
                _log.error("%s: the indices do not fit %d pages", transfer.name, len(keys))
                done[transfer.name] = [False] * len(keys)
            else:
                done[transfer.name] = move(pool, keys, indices)
        return done

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Return a page, in `target_location` if given; None if it is not stored."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Any]:
        """Return pages, each flat; None for those that are not stored."""
        pool = self._flat()
        given = list(target_locations or [None] * len(keys))
        pages = [pool.pool.get_dummy_flat_data_page() if at is None else at for at in given]
        good = self._filled(pool, keys, [bytes_of(page) for page in pages])
        return [page if there else None for page, there in zip(pages, good, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store a flat page; return whether it is stored."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:  # fmt: skip
        """Store flat pages; return whether all are stored."""
        pool, bodies = self._flat(), [bytes_of(value.contiguous()) for value in values or ()]
        if any((body.nbytes,) != pool.sizes for body in bodies):
            return False
        return all(self._store(pool, keys, bodies))

    def _flat(self) -> HostPool:
        if self._pool().in_place:
            raise ConfigError(
                "flat pages were requested, but pages are stored in the pool's memory layout",
                'Leave "interface_v1" out, or call batch_get_v1 and batch_set_v1',
            )
        return self._pool()

    def _load(self, pool: HostPool, keys: list[str], indices: torch.Tensor) -> list[bool]:
        return pool.filled(indices, lambda runs: self._filled(pool, keys, runs))

    def _filled(self, pool: HostPool, keys: list[str], runs: Sequence[memoryview]) -> list[bool]:
        names = pool.frame_names(keys)
        loads = [Load(name, run, pool.layout) for name, run in zip(names, runs, strict=True)]
        try:
            return self._served(loads, loads=True, deadline_s=self._settings.load_deadline_s)
        finally:
            self._held.release_frames(names)

    def _store(
        self, pool: HostPool, keys: list[str], runs: Sequence[memoryview], above: Sequence[str] = ()
    ) -> list[bool]:
        names, n, stores = pool.frame_names(keys), len(pool.sizes), list[Store]()
        parents = [*(pool.frame_names(above) or [ROOT] * n), *names]
        if pool.name != PoolName.KV:  # pages of K and V alone form a chain
            parents = [ROOT] * len(parents)
        for i, (name, parent, run) in enumerate(zip(names, parents, runs, strict=False)):
            said = pool.layout, parent, pool.namespace, 0, pool.page_size, pool.sizes[i % n], ROOT
            stores.append(Store(name, door.raw_page(*said, *self._rank), run.toreadonly()))
        return pool.whole(self._served(stores, loads=False))

    def _served(self, items: Sequence[Any], *, loads: bool, **how: float) -> list[bool]:
        """Run a job, and return for each item whether it was served."""
        if not items or not self.keeper.open:
            return [False] * len(items)
        jobs = door.Jobs(self.keeper.caller())  # so that each thread gets its own answers
        job = jobs.start_job(items, items, 0, loads=loads, **how)
        while jobs:
            jobs.finished(0.5)
        return [at in job.sizes for at in range(len(items))]

    def clear(self) -> None:
        """Delete every page of this model, rank and configuration."""
        mine = {pool.namespace for pool in self._pools.values()}
        caller = self._held.caller
        caller.delete([e.key for e in caller.scan() if e.info.namespace in mine])

    def close(self) -> None:
        """End all transfers and close the places. Safe to call again."""
        self.keeper.close()
