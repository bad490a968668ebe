"""FlowKV inside LMCache, by configuration: an L2 adapter, and a serde with FlowKV's codecs.

`FlowKVL2Adapter` is a `plugin` adapter: objects that LMCache's server evicts to L2 are stored on
the places of a `Keeper`, verified before LMCache reads them, and found again by later processes.
The serde `flowkv` encodes K and V in INT8 or INT4 on the way to any L2 adapter. See
docs/guides/lmcache.md. Importing this module imports LMCache and torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import xxhash

from flowkv.connect import door
from flowkv.connect.identity import fingerprint, identify
from flowkv.core.errors import ConfigError, experimental
from flowkv.core.geometry import CODECS, Geometry, PageLayout, page_layout
from flowkv.core.keys import ROOT, tenant_salt
from flowkv.kernels import transcode
from flowkv.residency.keeper import open_keeper
from flowkv.tiers.base import UNBOUNDED, FrameInfo, Load, Outcome, Store, TierAnswer

TESTED = "0.5"
"""The version of LMCache that this connector was tested with."""

try:
    from lmcache import __version__ as lmcache_version
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
    from lmcache.v1.distributed.serde.base import Deserializer, Serializer
    from lmcache.v1.distributed.serde.factory import (
        get_registered_serde_types,
        register_serde_factory,
    )
    from lmcache.v1.platform import create_event_notifier
except ImportError as error:
    raise door.untested("LMCache", TESTED, error) from error

experimental(__name__, "LMCache changes the interfaces below it with its own releases")

_Known = tuple[Any, int]
_log = logging.getLogger("flowkv")
_ASK_AGAIN_S = 0.005
_IDLE_S = 0.5

door.check_version("LMCache", "adapter", lmcache_version, TESTED)


# ---- the adapter


class _Question(NamedTuple):
    """Look-up that a remote tier has not answered yet."""

    task: int
    names: list[bytes]
    until_s: float


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
        self._namespaces: dict[str, bytes | None] = {}  # None: in search, or not identified
        for model in self._models:
            self._namespaces[model] = self._identify(model)
        self.keeper = open_keeper(*said.places, **said.options)
        # Objects that LMCache was notified of: key, size.
        self._known = door.Announced[_Known](self.keeper)
        self.keeper.on_evicted = self._evicted
        self._caller = self.keeper.caller()
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._stored, self._looked_up, self._loaded = self._notifiers
        self._lock = threading.Lock()
        self._next, self._transfers = 0, dict[int, door.Transfer]()  # by the keeper's job
        self._questions: list[_Question] = []
        self._done: tuple[dict[int, Any], ...] = ({}, {}, {})  # stores, look-ups, loads
        self._locks = door.Holds(self._caller, math.inf)  # LMCache ends each
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._thread = threading.Thread(target=self._run, name="flowkv lmcache", daemon=True)
        self._thread.start()

    # ---- identity of the bytes

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
            threading.Thread(target=self._meet, args=(model,), daemon=True).start()
        return self._namespaces[model]

    def _meet(self, model: str) -> None:
        try:
            self._namespaces[model] = self._identify(model)
        except ConfigError as error:
            _log.warning("a model is not identified, and its objects are not stored: %s", error)

    def _name(self, key: Any) -> bytes | None:
        namespace = self._namespace(key.model_name)
        if namespace is None:
            return None
        salt = key.cache_salt.encode()
        fixed = struct.pack("<QQQ", key.kv_rank, key.object_group_id, len(salt))
        return hashlib.sha256(namespace + fixed + salt + key.chunk_hash).digest()

    def _info(self, key: Any, n_bytes: int, layout: bytes) -> FrameInfo:
        salt, namespace = key.cache_salt, self._namespace(key.model_name) or ROOT
        tenant = tenant_salt(salt, self._settings.secret) if salt else ROOT
        # LMCache passes neither the parent nor the number of tokens
        return door.raw_page(layout, ROOT, namespace, key.object_group_id, 0, n_bytes, tenant)

    # ---- calls of LMCache

    def get_store_event_fd(self) -> int:
        """Return a descriptor that is readable once stores are over."""
        return int(self._stored.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return a descriptor that is readable once look-ups are over."""
        return int(self._looked_up.fileno())

    def get_load_event_fd(self) -> int:
        """Return a descriptor that is readable once loads are over."""
        return int(self._loaded.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to store objects, which LMCache may reuse once the task is over."""
        names = [self._name(key) for key in keys]
        stores = [
            Store(name, self._info(key, body.nbytes, _layout(each)), body)
            for name, key, each in zip(names, keys, objects, strict=True)
            if name is not None and (body := _bytes(each).toreadonly())
        ]
        return self._submit(keys, stores, self._caller.submit_store, loads=False)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to fill objects; an object that is not served may have any contents."""
        names = [self._name(key) for key in keys]
        loads = [
            Load(name, _bytes(each), _layout(each))
            for name, each in zip(names, objects, strict=True)
            if name is not None
        ]
        start = partial(self._caller.submit_load, deadline_s=self._settings.load_deadline_s)
        return self._submit(keys, loads, start, loads=True)

    def _submit(
        self, keys: list[Any], items: list[Any], start: Callable[[list[Any]], int], *, loads: bool
    ) -> int:
        with self._lock:
            transfer = door.Transfer(self._new_task(), keys, loads=loads)
            if len(items) < len(keys) or not keys:  # their model is not identified
                self._finish(transfer)
            else:
                self._transfers[start(items)] = transfer
            return transfer.number

    def submit_lookup_and_lock_task(
        self, keys: list[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Start a look-up of objects; found ones are held until they are unlocked."""
        names = [self._name(key) or b"" for key in keys]
        with self._lock:
            task = self._new_task()
            self._locks.hold_frames(names)
            question = _Question(task, names, time.monotonic() + self._settings.lookup_deadline_s)
            if not self._answer(question):
                self._questions.append(question)
                os.eventfd_write(self._wake, 1)
            return task

    def submit_unlock(self, keys: list[Any]) -> None:
        """Release objects that were looked up."""
        with self._lock:
            self._locks.release_frames([self._name(key) or b"" for key in keys])

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Return the results of stores that ended since the last call."""
        with self._lock:
            done = dict(self._done[0])
            self._done[0].clear()
            return done

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Return a bitmap of the objects found, once; None while the look-up is under way."""
        with self._lock:
            return self._done[1].pop(task_id, None)

    def query_load_result(self, task_id: int) -> Any:
        """Return a bitmap of the objects served, once; None while the load is under way."""
        with self._lock:
            return self._done[2].pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Delete objects."""
        names = [name for key in keys if (name := self._name(key)) is not None]
        self._caller.delete(names)
        self._evicted(names)

    def get_usage(self) -> Any:
        """Return bytes in all places, with those from before a restart; by salt, bytes since."""
        usage, capacity = super().get_usage(), self._caller.capacity_bytes
        return dataclasses.replace(
            usage,
            total_bytes_used=self._caller.used_bytes(),
            total_capacity_bytes=capacity if capacity < UNBOUNDED else 0,
        )

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
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._caller.answers.close()
        for notifier in self._notifiers:
            notifier.close()
        os.close(self._wake)

    # ---- the thread that delivers answers

    def _run(self) -> None:
        ready = select.poll()
        for fd in (self._wake, self._caller.fileno()):
            ready.register(fd, select.POLLIN)
        more = True
        while more or self._open:  # and once more, for answers that closing has made
            more = self._open
            ready.poll(1000 * more * (_ASK_AGAIN_S if self._questions else _IDLE_S))
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            stored, served, over = list[_Known](), list[Any](), list[door.Transfer]()
            with self._lock:
                for answer in self._caller.poll():
                    self._settle(answer, stored, served, over)
                gone = self._known.take_gone()
                self._questions = [each for each in self._questions if not self._answer(each)]
            try:  # listeners may be foreign code
                if stored:
                    self._notify_keys_stored(*map(list, zip(*stored, strict=True)))
                if served:
                    self._notify_keys_accessed(served)
                if gone:
                    self._notify_keys_deleted(*map(list, zip(*gone, strict=True)))
            except Exception:
                _log.exception("LMCache's listeners failed")
            with self._lock:
                for transfer in over:
                    self._finish(transfer)

    def _settle(
        self, answer: TierAnswer, stored: list[_Known], served: list[Any], over: list[door.Transfer]
    ) -> None:
        transfer = self._transfers[answer.job]
        transfer.answered(answer)
        key, name = transfer.keys[answer.item], answer.key
        if answer.outcome is Outcome.HIT:
            served.append(key)
        elif answer.outcome is Outcome.STORED:
            if name not in self._known and self.keeper.knows(name):
                self._known[name] = key, answer.n_bytes
                stored.append(self._known[name])
        elif answer.outcome is Outcome.MISS:
            if answer.reason == "layout":  # another dtype: the next store replaces it
                self._caller.delete([name])
            self._known.departed([name])
        if not transfer.left:
            over.append(self._transfers.pop(answer.job))

    def _finish(self, transfer: door.Transfer) -> None:
        sizes, count = transfer.sizes, len(transfer.keys)
        if transfer.loads:
            self._done[2][transfer.number] = _bitmap(count, sizes)
            self._loaded.notify()
        else:
            result = L2StoreResult(len(sizes) == count, sum(sizes.values()))
            self._done[0][transfer.number] = result
            self._stored.notify()

    def _answer(self, question: _Question) -> bool:
        """Answer a look-up if all tiers have, or its time is up; return whether it was answered."""
        known = [name and self._caller.lookup([name], name)[0] for name in question.names]
        if None in known and time.monotonic() < question.until_s:
            return False
        found = [i for i, there in enumerate(known) if there]
        absent = [name for name, there in zip(question.names, known, strict=True) if not there]
        self._locks.release_frames(absent)
        self._done[1][question.task] = _bitmap(len(known), found)
        self._looked_up.notify()
        return True

    def _new_task(self) -> int:
        self._next += 1
        return self._next

    def _evicted(self, names: Sequence[bytes]) -> None:
        self._known.departed(names)
        if names:
            os.eventfd_write(self._wake, 1)


def _bytes(each: Any) -> memoryview:
    return memoryview(each.byte_array).cast("B")


def _bitmap(size: int, ones: Any) -> Any:
    bitmap = Bitmap(size)
    for i in ones:
        bitmap.set(i)
    return bitmap


def _layout(each: Any) -> bytes:
    """Return an object's layout digest; one for all objects of serdes, which record their own."""
    shapes = [list(map(int, shape)) for shape in each.get_shapes()]
    dtypes = [str(dtype) for dtype in each.get_dtypes()]
    flat = dtypes == ["torch.uint8"] and len(shapes[0]) == 1
    said = "bytes" if flat else repr((shapes, dtypes))
    return hashlib.sha256(said.encode()).digest()[:16]


# ---- the serde

_HEADER = struct.Struct("<8sIIff16s16s")
_MAGIC = b"flowkv/1"


class ObjectHead(NamedTuple):
    """Head of an object that the serde made.

    Attributes:
        codec: One of FlowKV's, such as "kv8".
        n_bytes: Bytes of the pages behind the head.
        most_lost_k: Greatest difference of a decoded element of K from the original.
        most_lost_v: The same of V.
        layout: Fingerprint of the pages' shape, dtype and codec.
    """

    codec: str
    n_bytes: int
    most_lost_k: float
    most_lost_v: float
    layout: bytes

    @classmethod
    def of(cls, blob: bytes | bytearray | memoryview) -> ObjectHead:
        """Read the head of an object.

        Raises:
            ConfigError: The object was not made by this version of FlowKV's serde, or is damaged.
        """
        if len(blob) < _HEADER.size or bytes(blob[: len(_MAGIC)]) != _MAGIC:
            raise ConfigError(
                "the object was not made by FlowKV's serde", "Give each serde places of its own"
            )
        _, codec, n_bytes, lost_k, lost_v, layout, _ = _HEADER.unpack_from(blob)
        if codec >= len(CODECS) or len(blob) < _HEADER.size + n_bytes:
            raise ConfigError("the head of an object is damaged", "It is computed and stored again")
        return cls(CODECS[codec], n_bytes, lost_k, lost_v, layout)


@lru_cache(maxsize=64)
def _layouts(
    shape: tuple[int, ...], dtype: torch.dtype, head_dim: int, codec: str
) -> tuple[PageLayout, PageLayout]:
    """Return the layouts of `[2, layers, tokens, heads * head_dim]` as a page, raw and encoded."""
    if len(shape) != 4 or shape[0] != 2 or shape[3] % head_dim:
        raise ConfigError(
            f"objects of shape {list(shape)} have no heads of size {head_dim}",
            "The serde takes [2, layers, tokens, heads * head_dim]: set head_dim to the model's; "
            "for latents (MLA) and states there is no codec, leave the serde out",
        )
    _, layers, tokens, width = shape
    name = str(dtype).removeprefix("torch.")
    group = Geometry.uniform(
        layers=layers,
        kv_heads=width // head_dim,
        head_dim=head_dim,
        dtype=name,
        page_size=tokens,
    ).groups[0]
    return page_layout(group, tokens), page_layout(group, tokens, codec)


class _Codec:
    """Conversion of one model's objects between LMCache's layout and FlowKV pages."""

    def __init__(self, codec: str, head_dim: int) -> None:
        self._codec, self._head_dim = codec, head_dim

    def _layouts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[PageLayout, PageLayout]:
        return _layouts(tuple(map(int, shape)), dtype, self._head_dim, self._codec)


def _digest(head: bytes, pages: torch.Tensor, key: Any) -> bytes:
    """Return a digest over the head, up to the digest, the pages and the key of an object."""
    whose = (key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    digest = xxhash.xxh3_128(repr(whose).encode())
    digest.update(head)
    digest.update(pages.numpy().data)
    return digest.digest()


def _heads(arena: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Return K and V of a raw page in an arena as a view `[2, layers, tokens, heads, head_dim]`."""
    dtype = getattr(torch, layout.dtype)
    size = (2, layout.layers, layout.page_size, layout.kv_heads, layout.head_dim)
    strides = (
        layout.v_offset_bytes // dtype.itemsize,
        layout.stripe_stride_bytes // dtype.itemsize,
        layout.head_dim,
        layout.run_bytes // dtype.itemsize,
        1,
    )
    return arena.view(dtype).as_strided(size, strides)


def _granule(layout: PageLayout | None = None) -> torch.Tensor:
    return torch.tensor([layout.granules if layout else 0], dtype=torch.int32)


class FlowKVSerializer(_Codec, Serializer):
    """Serializer of `[2, layers, tokens, heads * head_dim]` as a head and one FlowKV page.

    Args:
        codec: "kv8", "k8v4", "kv4c" or "kv4h"; docs/explain/codecs.md.
        head_dim: Head dimension of the model.
    """

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """Return the exact size of an object in bytes.

        Raises:
            ConfigError: There is no codec for such objects.
        """
        if len(layout_desc.shapes) != 1:
            raise ConfigError(
                "an object has several tensors", "Leave the serde out: its codecs take one, K and V"
            )
        _, coded = self._layouts(layout_desc.shapes[0], layout_desc.dtypes[0])
        return _HEADER.size + coded.page_bytes

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        """Encode an object, decode it again to measure the loss, and return its size.

        Raises:
            ConfigError: A number is not finite, or out of the codec's range: it is not stored.
        """
        values = src.tensor
        raw, coded = self._layouts(values.shape, values.dtype)
        shape = (*values.shape[:3], raw.kv_heads, raw.head_dim)
        arena = torch.zeros(raw.page_bytes + coded.page_bytes, dtype=torch.uint8)
        page = _heads(arena, raw)
        page.copy_(values.view(shape))
        if transcode(arena, _granule(), _granule(raw), raw, coded).any():
            raise ConfigError(
                f"an object has numbers that {self._codec} cannot hold, and is not stored",
                "If this is frequent, use another codec, or none",
            )
        transcode(arena, _granule(raw), _granule(), coded, raw)
        lost = (page.float() - values.view(shape).float()).abs().flatten(1).amax(1).tolist()
        pages, into = arena[raw.page_bytes :], dst.tensor.view(torch.uint8).flatten()
        said = CODECS.index(coded.codec), coded.page_bytes, *lost, coded.fingerprint()
        head = _HEADER.pack(_MAGIC, *said, b"")[:-16]
        head += _digest(head, pages, key)
        into[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        into[len(head) : len(head) + len(pages)].copy_(pages)
        return len(head) + len(pages)


class FlowKVDeserializer(_Codec, Deserializer):
    """Deserializer of objects that `FlowKVSerializer` made. Arguments are the same."""

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        """Decode into `dst`, which is not changed if anything is wrong.

        Raises:
            ConfigError: The object is damaged, another key's, or of another model, dtype or codec.
        """
        blob = src.tensor.view(torch.uint8).flatten()
        head = bytes(blob[: _HEADER.size].numpy())
        said = ObjectHead.of(memoryview(blob.numpy()))
        values = dst.tensor
        raw, coded = self._layouts(values.shape, values.dtype)
        pages = blob[_HEADER.size : _HEADER.size + said.n_bytes]
        if said.layout != coded.fingerprint() or said.n_bytes != coded.page_bytes:
            raise ConfigError(
                f"an object in {said.codec} has another shape, dtype or codec than {coded.codec}",
                "Give each configuration places of its own",
            )
        if head[-16:] != _digest(head[:-16], pages, key):
            raise ConfigError("an object is damaged, or of another key", "It is computed again")
        arena = torch.empty(raw.page_bytes + coded.page_bytes, dtype=torch.uint8)
        arena[raw.page_bytes :].copy_(pages)
        if transcode(arena, _granule(raw), _granule(), coded, raw).any():
            raise ConfigError("an object holds no numbers", "It is computed again")
        page = _heads(arena, raw)
        values.view(page.shape).copy_(page)


def _serde(kwargs: Mapping[str, Any]) -> Any:
    options = dict(kwargs)
    codec, head_dim = str(options.pop("codec", "kv8")), options.pop("head_dim", None)
    workers = int(options.pop("max_workers", 1))
    if options or not isinstance(head_dim, int) or codec not in CODECS[1:]:
        raise ConfigError(
            f"FlowKV's serde has no options {dict(kwargs)}",
            'Set "serde": {"type": "flowkv", "codec": "kv8", "head_dim": 128}, with a codec of '
            f"{', '.join(CODECS[1:])} and, where one thread is not enough, max_workers",
        )
    return AsyncSerdeProcessor(
        FlowKVSerializer(codec, head_dim), FlowKVDeserializer(codec, head_dim), workers
    )


if "flowkv" not in get_registered_serde_types():
    register_serde_factory("flowkv", _serde)
