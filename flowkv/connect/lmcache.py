"""FlowKV inside LMCache, by configuration: an L2 adapter, and a serde with FlowKV's codecs.

`FlowKVL2Adapter` is a `plugin` adapter: objects that LMCache's server evicts to L2 are stored on
the places of a `Keeper`, verified before LMCache reads them, and found again by later processes.
The serde `flowkv` encodes K and V in INT8 or INT4 on the way to any L2 adapter. See
docs/guides/lmcache.md. Importing this module imports LMCache and torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import math
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowkv.connect import door
from flowkv.connect.identity import fingerprint, identify
from flowkv.core.errors import ConfigError, experimental
from flowkv.core.keys import ROOT
from flowkv.core.reaper import begin
from flowkv.residency.keeper import open_keeper
from flowkv.tiers.base import UNBOUNDED, FrameInfo, Load, Outcome, Store

TESTED = "0.5"
"""The version of LMCache that this connector was tested with."""

try:
    from lmcache import __version__ as lmcache_version
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.serde import factory
    from lmcache.v1.platform import create_event_notifier

    from flowkv.connect.serde import FlowKVDeserializer, FlowKVSerializer, ObjectHead, make_serde
except ImportError as error:
    raise door.untested("LMCache", TESTED, error) from error

experimental(__name__, "LMCache changes the interfaces below it with its own releases")

__all__ = ["FlowKVDeserializer", "FlowKVL2Adapter", "FlowKVSerializer", "ObjectHead"]

_Known = tuple[Any, int]
_log = logging.getLogger("flowkv")
_ASK_AGAIN_S = 0.005
_IDLE_S = 0.5

door.check_version("LMCache", "adapter", lmcache_version, TESTED)


class _Results(dict[int, Any]):
    """Results of one kind of task, with the descriptor that LMCache polls for them."""

    def __init__(self) -> None:
        super().__init__()
        self.notifier = create_event_notifier()
        self.fd = int(self.notifier.fileno())

    def deliver(self, task: int, result: Any) -> None:
        self[task] = result
        self.notifier.notify()


class FlowKVL2Adapter(L2AdapterInterface):
    """L2 adapter of LMCache's over a keeper. Only the constructor, `delete` and `close` wait.

    Args:
        params: `adapter_params` of LMCache's configuration:
            places: "disk:/nvme/kv:200GiB", or several, fastest first.
            models: Paths of models, by LMCache's names of them. The name of any other model is its
                path; objects of a model that cannot be found are not stored.
            weights: Name of the weights in place of a digest: of all models, or by model name.
            revision: Revision of the models, if the weights alone do not identify them.
            load_deadline_s: A load that takes longer is a miss.
            lookup_deadline_s: A look-up in a remote place that takes longer is a miss.
            And options of `open_keeper`: policy, quotas (by cache salt), durability, integrity,
            secret, lossless.
        l1_memory_desc: LMCache's.

    Attributes:
        keeper: The keeper of the frames.

    Raises:
        ConfigError: A parameter is missing or invalid.
        StoreError: A place cannot be used.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        remedy = 'Set "adapter_params": {"places": ["disk:/nvme/kv:200GiB"]}'
        self._settings = said = door.Settings("adapter", params, remedy)
        self._models: dict[str, str] = dict(said.options.pop("models", {}))
        # None: in search, or not identified.
        self._namespaces: dict[str, bytes | None] = {m: self._identify(m) for m in self._models}
        self.keeper = open_keeper(*said.places, **said.options)
        self._known = door.Announced[_Known](self.keeper)  # that LMCache was notified of
        self._caller = self.keeper.caller()
        self._jobs = door.Jobs(self._caller)
        self.keeper.on_evicted = self._evicted
        self._locks = door.Holds(self._caller, math.inf)  # LMCache ends each
        self._lookups = list[door.Lookup]()
        self._stored, self._found, self._loaded = (_Results() for _ in range(3))
        self._numbers = itertools.count()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="flowkv lmcache", daemon=True)
        self._thread.start()

    def _identify(self, model: str) -> bytes:
        named = self._settings.weights
        weights: str = named.get(model, "") if isinstance(named, dict) else named
        made_by = {"engine": "lmcache"} | ({"model": model} if weights else {})
        weights = weights or fingerprint(self._models.get(model, model))
        return identify(model, made_by, weights, self._settings.revision)[0]

    def _namespace(self, model: str) -> bytes | None:
        """Return a model's namespace; None while it is being computed, or if that failed."""
        if model not in self._namespaces:
            self._namespaces[model] = None
            if begin(self._meet, model, name="flowkv lmcache") is None:
                return self._namespaces.pop(model)
        return self._namespaces[model]

    def _meet(self, model: str) -> None:
        try:
            self._namespaces[model] = self._identify(model)
        except ConfigError as error:
            _log.warning("a model is not identified, and its objects are not stored: %s", error)

    def _name(self, key: Any) -> bytes:
        """Return the name of an object's frame; b"" if its model is not identified."""
        namespace = self._namespace(key.model_name)
        if namespace is None:
            return b""
        salt = key.cache_salt.encode()
        fixed = struct.pack("<QQQ", key.kv_rank, key.object_group_id, len(salt))
        return hashlib.sha256(namespace + fixed + salt + key.chunk_hash).digest()

    def _info(self, key: Any, n_bytes: int, layout: bytes) -> FrameInfo:
        salt = self._settings.salt(key.cache_salt)
        # LMCache passes neither the parent nor the number of tokens
        where = self._namespace(key.model_name) or ROOT, key.object_group_id
        return door.raw_page(layout, ROOT, *where, 0, n_bytes, salt)

    # ---- calls of LMCache

    def get_store_event_fd(self) -> int:
        """Return a descriptor that is readable once stores are over."""
        return self._stored.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return a descriptor that is readable once look-ups are over."""
        return self._found.fd

    def get_load_event_fd(self) -> int:
        """Return a descriptor that is readable once loads are over."""
        return self._loaded.fd

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to store objects, which LMCache may reuse once the task is over."""
        return self._submit(keys, objects, loads=False)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to fill objects; an object that is not served may have any contents."""
        return self._submit(keys, objects, loads=True)

    def _submit(self, keys: list[Any], objects: list[Any], *, loads: bool) -> int:
        items, task = list[Load | Store](), next(self._numbers)
        how = {"deadline_s": self._settings.load_deadline_s} if loads else {}
        for key, each in zip(keys, objects, strict=True):
            body, layout = memoryview(each.byte_array).cast("B"), _layout(each)
            if name := self._name(key):
                info = self._info(key, body.nbytes, layout)
                store = Store(name, info, body.toreadonly())
                items.append(Load(name, body, layout) if loads else store)
        if len(items) < len(keys) or not keys:  # their model is not identified
            self._finish(door.Transfer(task, keys, loads=loads))
        else:
            self._jobs.start_job(items, keys, task, loads=loads, **how)
        return task

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Start a look-up of objects; found ones are held until they are unlocked."""
        limit_s, task = self._settings.lookup_deadline_s, next(self._numbers)
        lookup = door.Lookup(self._locks, [*map(self._name, keys)], limit_s, task)
        if not self._answer(lookup):
            self._lookups.append(lookup)
            self._jobs.wake()
        return task

    def submit_unlock(self, keys: list[Any]) -> None:
        """Release objects that were looked up."""
        self._locks.release_frames([*map(self._name, keys)])

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of stores that ended since the last call."""
        return {task: self._stored.pop(task) for task in list(self._stored)}

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a bitmap of the objects found, once; None while the look-up is under way."""
        return self._found.pop(task_id, None)

    def query_load_result(self, task_id: int) -> Any:
        """Return a bitmap of the objects served, once; None while the load is under way."""
        return self._loaded.pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects."""
        names = [*filter(None, map(self._name, keys))]
        self._caller.delete(names)
        self._evicted(names)

    def get_usage(self) -> Any:
        """Return bytes in all places, with those from before a restart; by salt, bytes since."""
        used, most = self._caller.used_bytes(), self._caller.capacity_bytes
        total = {"total_bytes_used": used, "total_capacity_bytes": most * (most < UNBOUNDED)}
        return dataclasses.replace(super().get_usage(), **total)

    def report_status(self) -> dict[str, Any]:
        """Return the health of the adapter, and the keeper's report."""
        healthy = self.keeper.open and self._thread.is_alive()
        return {"is_healthy": healthy, **self.keeper.report()}

    def close(self) -> None:
        """End all transfers and close the places. Safe to call again."""
        if not self._open:
            return
        self.keeper.close()  # answers all requests
        self._open = False
        self._jobs.wake()
        self._thread.join()
        for results in (self._stored, self._found, self._loaded):
            results.notifier.close()

    # ---- the thread that delivers answers

    def _run(self) -> None:
        more = True
        while more or self._open:  # and once more, for answers that closing has made
            more = self._open
            over = self._jobs.finished(more * (_ASK_AGAIN_S if self._lookups else _IDLE_S))
            self._notify(over)
            for transfer in over:
                self._finish(transfer)
            for lookup in list(self._lookups):
                if self._answer(lookup):
                    self._lookups.remove(lookup)

    def _notify(self, over: Sequence[door.Transfer]) -> None:
        """Notify LMCache's listeners of what finished transfers have changed."""
        stored, served = list[_Known](), list[Any]()
        for key, answer in ((each.keys[one.item], one) for each in over for one in each.answers):
            name = answer.key
            if answer.outcome is Outcome.HIT:
                served.append(key)
            elif answer.outcome is Outcome.STORED:
                if self._known.arrived(name, known := (key, answer.n_bytes)):
                    stored.append(known)
            elif answer.outcome is Outcome.MISS:
                if answer.reason == "layout":  # another dtype: the next store replaces it
                    self._caller.delete([name])
                self._known.departed([name])
        gone = self._known.take_gone()
        try:  # listeners may be foreign code
            if stored:
                self._notify_keys_stored(*map(list, zip(*stored, strict=True)))
            if served:
                self._notify_keys_accessed(served)
            if gone:
                self._notify_keys_deleted(*map(list, zip(*gone, strict=True)))
        except Exception:
            _log.exception("LMCache's listeners failed")

    def _finish(self, transfer: door.Transfer) -> None:
        sizes, count = transfer.sizes, len(transfer.keys)
        if transfer.loads:
            self._loaded.deliver(transfer.number, _bitmap(i in sizes for i in range(count)))
        else:
            result = L2StoreResult(len(sizes) == count, sum(sizes.values()))
            self._stored.deliver(transfer.number, result)

    def _answer(self, lookup: door.Lookup) -> bool:
        """Give LMCache the result of a look-up that is over; return whether it is."""
        if over := lookup.is_over():
            self._found.deliver(lookup.number, _bitmap(lookup.found))
        return over

    def _evicted(self, names: Sequence[bytes]) -> None:
        self._known.departed(names)
        if names:
            self._jobs.wake()


def _bitmap(bits: Iterable[bool]) -> Any:
    there = list(bits)
    bitmap = Bitmap(len(there))
    for i in itertools.compress(itertools.count(), there):
        bitmap.set(i)
    return bitmap


def _layout(each: Any) -> bytes:
    """Return an object's layout digest; one for all objects of serdes, which record their own."""
    shapes = [list(map(int, shape)) for shape in each.get_shapes()]
    dtypes = [str(dtype) for dtype in each.get_dtypes()]
    flat = dtypes == ["torch.uint8"] and len(shapes[0]) == 1
    said = "bytes" if flat else repr((shapes, dtypes))
    return hashlib.sha256(said.encode()).digest()[:16]


if "flowkv" not in factory.get_registered_serde_types():
    factory.register_serde_factory("flowkv", make_serde)
