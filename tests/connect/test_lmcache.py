"""LMCache's door, against LMCache's own classes; where it is not installed, CI has it installed."""

from __future__ import annotations

import importlib
import importlib.util
import queue
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowkv.connect import Keeper
from flowkv.policy import make_policy
from flowkv.testing import FlakyTier
from flowkv.tiers.disk import DiskTier
from tests.clock import wait_for
from tests.connect.far import flip, stuck_tier
from tests.inside import (
    BasisFile,
    ConfigError,
    Faults,
    HostTier,
    KeyTurn,
    KeyTurns,
    open_basis,
    read_head,
    save_basis,
)
from tests.kvt.pages import Source, group, layout, learner

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed", allow_module_level=True)

from lmcache.v1.distributed import api
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.distributed.storage_manager import StorageManager

door = importlib.import_module("flowkv.connect.lmcache")

LAYERS, TOKENS, HEADS, DIM = 3, 64, 2, 64
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * DIM])
OBJECT_BYTES = 2 * LAYERS * TOKENS * HEADS * DIM * 2
CHUNKS = 8
PLAIN = {"weights": "commit 1"}


def key_of(n: int, model: str = "org/model", salt: str = "") -> Any:
    return api.ObjectKey(bytes([n]) * 32, model, 0x01000100, 0, salt)


def values_of(n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)).to(dtype)


# ---- LMCache's own manager, in processes of their own


def manager(directory: Path, serde: dict[str, Any] | None = None, **params: Any) -> Any:
    config = PluginL2AdapterConfig(
        "flowkv.connect.lmcache",
        "FlowKVL2Adapter",
        {"places": f"disk:{directory}:64MiB", **PLAIN, **params},
    )
    if serde:
        config.serde_config = SerdeConfig("flowkv", serde)
    memory = L1MemoryManagerConfig(size_in_bytes=32 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=memory),
            eviction_config=EvictionConfig("LRU"),
            l2_adapter_config=L2AdaptersConfig([config]),
        )
    )


DESC = api.MemoryLayoutDesc([SHAPE], [torch.bfloat16])


def write(
    directory: Path, serde: dict[str, Any] | None, values: Callable[[int], Any] = values_of
) -> None:
    """What another process has stored before the test looks."""
    one = manager(directory, serde)
    keys = [key_of(n) for n in range(CHUNKS)]
    for n, each in enumerate(one.reserve_write(keys, DESC).values()):
        each.tensor.copy_(values(n))
    one.finish_write(keys)
    (adapter,) = (adapter for _, adapter in one.l2_adapters())
    wait_for(lambda: adapter.report_status()["answers"].get("stored", 0) >= CHUNKS)
    one.close()


def read(one: Any) -> list[torch.Tensor]:
    """What LMCache's manager brings back of a prefix."""
    keys = [key_of(n) for n in range(CHUNKS)]
    row = api.GroupedObjectKeys(keys=keys, object_group_id=0, layout_desc=DESC)
    handle = one.submit_prefetch_task(api.PrefetchTaskSpec([row]))
    assert one.wait_prefetch_status(handle, 60.0)
    n = one.query_prefetch_status(handle).hit_cells[0].popcount()
    with one.read_prefetched_results(keys[:n]) as found:
        values = [each.tensor.clone() for each in found or ()]
    one.finish_read_prefetched(keys[:n])
    return values


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(codec: str) -> Path:
        if codec not in made:
            directory = tmp_path_factory.mktemp(codec or "plain")
            command = f"from tests.connect.test_lmcache import *; write(Path({str(directory)!r}),"
            command += f" {serde_of(codec)!r})"
            subprocess.run([sys.executable, "-c", command], check=True, timeout=240)
            made[codec] = directory
        return made[codec]

    return of


def serde_of(codec: str) -> dict[str, Any] | None:
    return {"codec": codec, "head_dim": DIM} if codec else None


def test_another_process_finds_all_of_it(written: Callable[[str], Path], tmp_path: Path) -> None:
    one = manager(shutil.copytree(written(""), tmp_path / "kv"))
    try:
        found = read(one)
    finally:
        one.close()
    assert len(found) == CHUNKS
    assert all(torch.equal(each, values_of(n)) for n, each in enumerate(found))


@pytest.mark.parametrize("damaged", [0, 5])
def test_a_flipped_bit_stops_at_its_chunk(
    written: Callable[[str], Path], tmp_path: Path, damaged: int
) -> None:
    directory = shutil.copytree(written(""), tmp_path / "kv")
    flip(directory, values_of(damaged))
    one = manager(directory)
    try:
        found = read(one)
        (adapter,) = (adapter for _, adapter in one.l2_adapters())
        assert adapter.report_status()["answers"]["miss:digest"] == 1
    finally:
        one.close()
    assert len(found) == damaged
    assert all(torch.equal(each, values_of(n)) for n, each in enumerate(found))


@pytest.mark.parametrize("change", [{"weights": "commit 2"}, {"revision": "tuned"}])
def test_other_weights_find_nothing(
    written: Callable[[str], Path], tmp_path: Path, change: dict[str, str]
) -> None:
    one = manager(shutil.copytree(written(""), tmp_path / "kv"), **change)
    try:
        assert read(one) == []
    finally:
        one.close()


@pytest.mark.parametrize(("codec", "most"), [("kv8", 0.05), ("k8v4", 0.6)])
def test_another_process_decodes_what_the_serde_made(
    written: Callable[[str], Path], tmp_path: Path, codec: str, most: float
) -> None:
    one = manager(shutil.copytree(written(codec), tmp_path / "kv"), serde_of(codec))
    try:
        found = read(one)
    finally:
        one.close()
    assert len(found) == CHUNKS
    for n, each in enumerate(found):
        assert 0 < (each.float() - values_of(n).float()).abs().max() < most


def test_a_serde_finds_nothing_of_what_was_stored_without_it(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    one = manager(shutil.copytree(written(""), tmp_path / "kv"), serde_of("kv8"))
    try:
        assert read(one) == []
    finally:
        one.close()


# ---- the adapter, call by call


class Client:
    """Calls as LMCache's controllers make them: submit, wait for the event, ask."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def _wait(self, fd: int, ask: Callable[[], Any], within_s: float = 60.0) -> Any:
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        end = time.monotonic() + within_s
        while (found := ask()) is None:
            assert time.monotonic() < end
            ready.poll(100)
        return found

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        done: dict[int, Any] = {}

        def ask() -> Any:
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(task)

        return self._wait(self.adapter.get_store_event_fd(), ask)

    def _bits(self, bitmap: Any, n: int) -> list[bool]:
        return [bitmap.test(i) for i in range(n)]

    def lookup(self, keys: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), {0: DESC})
        fd = self.adapter.get_lookup_and_lock_event_fd()
        found = self._wait(fd, lambda: self.adapter.query_lookup_and_lock_result(task))
        assert self.adapter.query_lookup_and_lock_result(task) is None  # told once
        return self._bits(found, len(keys))

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        fd = self.adapter.get_load_event_fd()
        found = self._wait(fd, lambda: self.adapter.query_load_result(task))
        assert self.adapter.query_load_result(task) is None
        return self._bits(found, len(keys))


def object_of(values: torch.Tensor) -> Any:
    """What an adapter uses of LMCache's MemoryObj."""
    return SimpleNamespace(
        byte_array=memoryview(values.view(torch.uint8).numpy()).cast("B"),
        tensor=values,
        get_shapes=lambda: [values.shape],
        get_dtypes=lambda: [values.dtype],
    )


class Listener:
    def __init__(self) -> None:
        self.there: dict[Any, int] = {}
        self.used: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        assert not self.there.keys() & set(keys)
        self.there.update(zip(keys, sizes, strict=True))

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.used += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        for key in keys:
            del self.there[key]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    made: list[Any] = []

    def client(**params: Any) -> Client:
        places = f"disk:{tmp_path / 'kv'}:64MiB"
        made.append(door.FlowKVL2Adapter({"places": places, **PLAIN, **params}))
        return Client(made[-1])

    yield client
    for one in made:
        one.close()
        one.close()  # safe again


def over(monkeypatch: pytest.MonkeyPatch, *tiers: Any) -> None:
    keeper = Keeper(tiers, lambda kind, capacity_bytes: make_policy("lru"))
    monkeypatch.setattr(door, "open_keeper", lambda *places, **options: keeper)


def test_it_is_all_that_lmcache_asks_for(make: Callable[..., Client]) -> None:
    adapter = make().adapter
    assert isinstance(adapter, L2AdapterInterface)
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3
    assert not adapter.supports_global_eviction  # FlowKV's policy gives up what must go
    assert adapter.report_status()["is_healthy"]
    assert adapter.pop_completed_store_tasks() == {}


def test_objects_come_back(make: Callable[..., Client]) -> None:
    client = make()
    keys = [key_of(n) for n in range(4)]
    sources = [values_of(n) for n in range(4)]
    result = client.store(keys, [object_of(each) for each in sources])
    assert result.is_successful()
    assert result.bytes_transferred() >= 4 * OBJECT_BYTES
    assert client.lookup([*keys, key_of(9)]) == [True] * 4 + [False]
    targets = [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(5)]
    assert client.load([*keys, key_of(9)], [object_of(each) for each in targets]) == [
        *[True] * 4,
        False,
    ]
    assert all(map(torch.equal, sources, targets))


def test_nothing_at_all_is_answered(make: Callable[..., Client]) -> None:
    client = make()
    assert client.store([], []).is_successful()
    assert client.lookup([]) == []
    assert client.load([], []) == []


@pytest.mark.parametrize("other", [{"salt": "bob"}, {"model": "other/model"}])
def test_others_keys_find_nothing(make: Callable[..., Client], other: dict[str, str]) -> None:
    client = make()
    assert client.store([key_of(1)], [object_of(values_of(1))]).is_successful()
    assert client.lookup([key_of(1, **other)]) == [False]


def test_another_dtype_is_a_miss_and_takes_the_place(make: Callable[..., Client]) -> None:
    client, key = make(), key_of(1)
    client.store([key], [object_of(values_of(1))])
    for _ in range(2):
        target = torch.zeros(SHAPE, dtype=torch.float16)
        hit = client.load([key], [object_of(target)])
        client.store([key], [object_of(values_of(1, torch.float16))])
    assert hit == [True]
    assert torch.equal(target, values_of(1, torch.float16))


def test_what_is_locked_stays_until_as_many_unlocks(
    make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    over(monkeypatch, HostTier(4 * HostTier(1 << 20).frame_bytes(OBJECT_BYTES)))
    client = make()

    def fill(names: range) -> None:
        for n in names:
            client.store([key_of(n)], [object_of(values_of(n))])

    fill(range(4))
    assert client.lookup([key_of(0)]) == client.lookup([key_of(0)]) == [True]
    client.adapter.submit_unlock([key_of(0)])
    fill(range(10, 14))
    assert client.lookup([key_of(0), key_of(1)]) == [True, False]
    client.adapter.submit_unlock([key_of(0)])
    client.adapter.submit_unlock([key_of(0)])
    fill(range(20, 24))
    assert client.lookup([key_of(0)]) == [False]
    assert not client.adapter._locks


def test_lmcache_hears_of_what_comes_and_goes(
    make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    over(monkeypatch, HostTier(4 * HostTier(1 << 20).frame_bytes(OBJECT_BYTES)))
    client, listener = make(), Listener()
    client.adapter.register_listener(listener)
    for n in range(10):
        key = key_of(n, salt="ann" if n % 2 else "")
        client.store([key], [object_of(values_of(n))])
        client.store([key], [object_of(values_of(n))])  # there already: told once
    assert len(listener.there) == 4
    last = key_of(9, salt="ann")
    target = torch.zeros(SHAPE, dtype=torch.bfloat16)
    assert client.load([last], [object_of(target)]) == [True]
    assert listener.used == [last]
    usage = client.adapter.get_usage()
    assert usage.total_bytes_used <= usage.total_capacity_bytes
    assert usage.bytes_by_cache_salt["ann"] == sum(
        size for key, size in listener.there.items() if key.cache_salt
    )
    client.adapter.delete([last])
    assert client.lookup([last]) == [False]
    wait_for(lambda: len(listener.there) == 3)
    client.adapter._evicted([client.adapter._name(key) for key in listener.there])  # late news
    assert client.store([last], [object_of(values_of(9))]).is_successful()
    assert len(listener.there) == 4


def test_a_listener_that_fails_stops_nothing(make: Callable[..., Client]) -> None:
    class Bad(Listener):
        def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
            raise RuntimeError("a listener")

    client = make()
    client.adapter.register_listener(Bad())
    for n in range(3):
        assert client.store([key_of(n)], [object_of(values_of(n))]).is_successful()
    assert client.adapter.report_status()["is_healthy"]


def test_stores_and_deletes_at_once(make: Callable[..., Client]) -> None:
    """Whoever deletes what was stored this moment ends no thread, and accounts come out even."""
    client, listener = make(), Listener()
    client.adapter.register_listener(listener)
    key, stop = key_of(1), threading.Event()

    def delete() -> None:
        while not stop.is_set():
            client.adapter.delete([key])

    thread = threading.Thread(target=delete)
    thread.start()
    for _ in range(100):
        client.store([key], [object_of(values_of(1))])
    stop.set()
    thread.join()
    client.adapter.delete([key])
    wait_for(lambda: not listener.there)
    assert client.adapter.get_usage().bytes_by_cache_salt == {}
    assert client.adapter.report_status()["is_healthy"]


def test_who_deletes_without_a_pause_keeps_nobody_waiting(make: Callable[..., Client]) -> None:
    class Refilled(queue.SimpleQueue[bytes]):
        def get_nowait(self) -> bytes:
            name = super().get_nowait()
            if not done.is_set():
                self.put(name)
            return name

    done, client, key = threading.Event(), make(), key_of(1)
    client.adapter._known._left = Refilled()
    client.adapter.delete([key_of(2)])
    try:
        assert client.store([key], [object_of(values_of(1))]).is_successful()
    finally:
        done.set()


def test_adapters_leave_no_descriptor(tmp_path: Path) -> None:
    def opened() -> int:
        adapter = door.FlowKVL2Adapter({"places": f"disk:{tmp_path}:64MiB", **PLAIN})
        adapter.close()
        return len(list(Path("/proc/self/fd").iterdir()))

    opened()
    assert opened() == opened()


def test_a_tier_that_fails_brings_misses_and_no_wrong_byte(
    make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(fail=0.2, lose=0.2, flip=0.2, latency_s=0.002)
    over(monkeypatch, FlakyTier(HostTier(64 << 20), 3, faults))
    client, hits = make(), 0
    for round_ in range(5):
        keys = [key_of(n) for n in range(round_, round_ + 8)]
        client.store(keys, [object_of(values_of(n)) for n in range(round_, round_ + 8)])
        targets = [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in keys]
        served = client.load(keys, [object_of(each) for each in targets])
        hits += sum(served)
        for n, (hit, target) in enumerate(zip(served, targets, strict=True), round_):
            assert not hit or torch.equal(target, values_of(n)), "WRONG BYTES"
    assert 5 <= hits < 40


def test_a_place_that_hangs_costs_its_deadline(
    make: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    over(monkeypatch, stuck_tier())
    client = make(load_deadline_s=0.2, lookup_deadline_s=0.1)
    begun = time.monotonic()
    client.adapter.submit_lookup_and_lock_task([key_of(1)], {})  # waits for nobody
    assert client.lookup([key_of(1)]) == [False]
    target = torch.zeros(SHAPE, dtype=torch.bfloat16)
    assert client.load([key_of(1)], [object_of(target)]) == [False]
    assert time.monotonic() - begun < 60.0


def test_a_model_that_cannot_be_found_is_not_kept(
    make: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    client = make(weights={"org/model": "commit 1"})
    other = key_of(1, model="nowhere/to-be-found")
    for _ in range(3):
        assert not client.store([other], [object_of(values_of(1))]).is_successful()
        assert client.lookup([other]) == [False]
    # A model is identified in the background: its first objects may not be stored.
    wait_for(lambda: client.store([key_of(1)], [object_of(values_of(1))]).is_successful())
    wait_for(lambda: bool(caplog.records))
    assert len([one for one in caplog.records if "nowhere" in one.getMessage()]) == 1


def test_a_model_is_known_by_its_files(make: Callable[..., Client], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    key = key_of(1, model=str(model))
    client = make(weights="", models={str(model): str(model)})
    assert client.store([key], [object_of(values_of(1))]).is_successful()
    client.adapter.close()
    (model / "model.safetensors").write_bytes(b"weightz")
    assert make(weights="", models={str(model): str(model)}).lookup([key]) == [False]
    (model / "model.safetensors").write_bytes(b"weights")


@pytest.mark.parametrize("params", [{"places": []}, {"places": "disk"}, {"polcy": "lru"}])
def test_a_parameter_that_is_none(params: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        door.FlowKVL2Adapter({"places": f"disk:{tmp_path}:64MiB", **PLAIN, **params})
    with pytest.raises(ConfigError, match="places"):
        door.FlowKVL2Adapter({})


# ---- the serde


def encoded(codec: str, values: torch.Tensor, key: Any, basis: Any = None) -> Any:
    serializer = door.FlowKVSerializer(codec, DIM, basis)
    desc = api.MemoryLayoutDesc([values.shape], [values.dtype])
    into = torch.zeros(serializer.estimate_serialized_size(desc), dtype=torch.uint8)
    n_bytes = serializer.serialize(object_of(values), object_of(into), key)
    assert n_bytes == len(into) or (basis and n_bytes < len(into))
    return object_of(into[:n_bytes])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    codec=st.sampled_from(["kv8", "k8v4", "kv4c", "kv4h"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layers=st.integers(1, 3),
    tokens=st.sampled_from([64, 128, 256]),
    heads=st.integers(1, 3),
    scale=st.floats(0.01, 30.0),
    seed=st.integers(0, 1 << 30),
)
def test_what_is_decoded_differs_by_what_the_head_says(
    codec: str, dtype: torch.dtype, layers: int, tokens: int, heads: int, scale: float, seed: int
) -> None:
    shape = torch.Size([2, layers, tokens, heads * DIM])
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)
    blob = encoded(codec, values, key_of(1))
    found = torch.full(shape, 7.0, dtype=dtype)
    door.FlowKVDeserializer(codec, DIM).deserialize(blob, object_of(found), key_of(1))
    lost = (found.float() - values.float()).abs().flatten(1).amax(1).tolist()
    said = door.ObjectHead.of(blob.byte_array)
    assert lost == pytest.approx([said.most_lost_k, said.most_lost_v], rel=1e-6)
    assert max(lost) <= scale
    assert said.codec == codec
    assert said.n_bytes < 0.6 * values.numel() * 2 + (4096 * layers)


def refused(
    blob: Any,
    codec: str = "kv8",
    dtype: Any = torch.bfloat16,
    key: Any = None,
    basis: Any = None,
    said: str = "",
) -> None:
    target = torch.full(SHAPE, 7.0, dtype=dtype)
    reader = door.FlowKVDeserializer(codec, DIM, basis)
    with pytest.raises(ConfigError, match=said):
        reader.deserialize(blob, object_of(target), key or key_of(1))
    assert (target == 7.0).all()


def test_the_serde_decodes_nothing_but_its_own() -> None:
    blob = encoded("kv8", values_of(1), key_of(1))
    refused(blob, "k8v4")
    refused(blob, dtype=torch.float16)
    refused(blob, key=key_of(2))
    refused(blob, key=key_of(1, salt="bob"))
    refused(object_of(torch.zeros(OBJECT_BYTES, dtype=torch.uint8)))
    refused(object_of(torch.zeros(10, dtype=torch.uint8)))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 7))
def test_a_flipped_bit_is_not_decoded(at: int, bit: int) -> None:
    blob = encoded("kv8", values_of(1), key_of(1))
    blob.tensor[at % blob.tensor.numel()] ^= 1 << bit
    refused(blob)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_no_codec_holds_are_not_stored(bad: float) -> None:
    values = values_of(1)
    values[1, 2, 3, 4] = bad
    with pytest.raises(ConfigError, match="cannot hold"):
        encoded("kv8", values, key_of(1))


@pytest.mark.parametrize("tokens", [0, 1, 17, 100, 512])
def test_objects_of_other_lengths_have_no_codec(tokens: int) -> None:
    desc = api.MemoryLayoutDesc([torch.Size([2, 3, tokens, 2 * DIM])], [torch.bfloat16])
    with pytest.raises(ConfigError, match=f"kv8 holds no objects of {tokens} tokens.*chunk_size"):
        door.FlowKVSerializer("kv8", DIM).estimate_serialized_size(desc)


def test_latents_have_no_codec() -> None:
    desc = api.MemoryLayoutDesc([torch.Size([1, 3, 64, 576])], [torch.bfloat16])
    with pytest.raises(ConfigError, match="MLA"):
        door.FlowKVSerializer("kv8", DIM).estimate_serialized_size(desc)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"head_dim": "64"}, {"head_dim": 64, "codec": "raw"}, {"head_dim": 64, "x": 1}),
        *({"codec": "kvt"}, {"codec": "kvt", "head_dim": 64}),
        {"codec": "kv8", "head_dim": 64, "basis": "basis.kvt"},
    ],
)
def test_a_serde_with_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="head_dim"):
        create_serde_processor(SerdeConfig("flowkv", options))


# ---- the serde at one to two bits a value

TURN = KeyTurn(1e4 ** (-np.arange(0, DIM, 2) / DIM))
KINDS = {
    "halves": (TURN,),
    "interleaved": (KeyTurn(TURN.inv_freq, interleaved=True),),
    "some dims": (KeyTurn(TURN.inv_freq[:12], start=8),),
    "some layers": (TURN, None),
}
OF_MODEL = group(layers=tuple(range(LAYERS)), kv_heads=HEADS, head_dim=DIM, value_dim=DIM)


@lru_cache
def source_of(kind: str = "halves", seed: int = 0) -> tuple[Source, BasisFile]:
    """A model's keys and values, and the basis that was learned from pages of 64 in float32."""
    source = Source(layout(kv_heads=HEADS, head_dim=DIM, value_dim=DIM), seed, bias=5.0)
    data = learner(source, *KINDS[kind]).coder(2e-3, {}).data
    return source, BasisFile("org/learned", OF_MODEL, 64, data)


@pytest.fixture(scope="module")
def basis_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    @lru_cache
    def of(kind: str = "halves", seed: int = 0) -> Any:
        path = tmp_path_factory.mktemp("basis") / "basis.kvt"
        save_basis(path, source_of(kind, seed)[1])
        return open_basis(path)

    return of


def prompt_part(
    n: int,
    kind: str = "halves",
    dtype: torch.dtype = torch.bfloat16,
    tokens: int = TOKENS,
    seed: int = 0,
) -> torch.Tensor:
    """The chunk of a prompt at n times its tokens, as LMCache has it."""
    source, _ = source_of(kind, seed)
    source.random.manual_seed(n)
    keys, values = source.sides(tokens)
    of_layers = [KINDS[kind][layer % len(KINDS[kind])] for layer in range(LAYERS)]
    keys = KeyTurns.of_layers(of_layers).apply(keys, n * tokens)
    both = torch.stack([keys, values]).transpose(2, 3)
    return both.reshape(2, LAYERS, tokens, HEADS * DIM).to(dtype)


def part_distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The greater relative distance of keys and of values, without first tokens."""
    parts = [(a[:, 4:].float(), b[:, 4:].float()) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in parts)


@settings(max_examples=20, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    kind=st.sampled_from(sorted(KINDS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    tokens=st.sampled_from([64, 128, 256]),
    at=st.integers(0, (1 << 17) - 1),
)
def test_chunks_come_back_wherever_they_stood(
    basis_of: Callable[..., Any], kind: str, dtype: torch.dtype, tokens: int, at: int
) -> None:
    place = at // tokens
    values, basis = prompt_part(place, kind, dtype, tokens), basis_of(kind)
    blob = encoded("kvt", values, key_of(1), basis)
    said = door.ObjectHead.of(blob.byte_array)
    assert said.codec == "kvt" and said.n_bytes < values.numel() * 0.5
    inside = read_head(blob.byte_array[-said.n_bytes :])
    assert inside is not None and inside.page_no == place
    found = torch.full(values.shape, 7.0, dtype=dtype)
    door.FlowKVDeserializer("kvt", 0, basis).deserialize(blob, object_of(found), key_of(1))
    lost = (found.float() - values.float()).abs().flatten(1).amax(1).tolist()
    assert lost == pytest.approx([said.most_lost_k, said.most_lost_v], rel=1e-6)
    assert part_distance(found, values) < 0.2


def test_another_process_decodes_what_the_serde_made_in_kvt(
    basis_of: Callable[..., Any], tmp_path: Path
) -> None:
    serde = {"codec": "kvt", "basis": str(basis_of().path)}
    command = f"from tests.connect.test_lmcache import *; write(Path({str(tmp_path / 'kv')!r}),"
    command += f" {serde!r}, prompt_part)"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=240)
    one = manager(tmp_path / "kv", serde)
    try:
        found = read(one)
    finally:
        one.close()
    assert len(found) == CHUNKS
    tier = DiskTier(tmp_path / "kv", 64 << 20)
    sizes = [entry.n_bytes for entry in tier.scan()]
    tier.close()
    assert len(sizes) == CHUNKS and max(sizes) < OBJECT_BYTES / 4
    for n, each in enumerate(found):
        assert 0 < part_distance(each, prompt_part(n)) < 0.2


@pytest.mark.parametrize("kind", ["another model", "noise", "half a chunk"])
def test_what_the_basis_does_not_fit_is_stored_in_kv8(
    basis_of: Callable[..., Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    values = prompt_part(3, seed=7) if kind == "another model" else values_of(1)
    if kind == "half a chunk":
        values = torch.cat([prompt_part(3)[:, :, :32], prompt_part(3, seed=7)[:, :, 32:]], 2)
    blob = encoded("kvt", values, key_of(1), basis_of())
    assert door.ObjectHead.of(blob.byte_array).codec == "kv8"
    (said,) = (one.getMessage() for one in caplog.records)
    assert "1 of 1 objects of org/model" in said and "basis.kvt of org/learned" in said
    found = torch.zeros(SHAPE, dtype=torch.bfloat16)
    door.FlowKVDeserializer("kvt", 0, basis_of()).deserialize(blob, object_of(found), key_of(1))
    assert part_distance(found, values) < 0.02


def test_threads_count_each_object_once(
    basis_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    serializer, whole = door.FlowKVSerializer("kvt", 0, basis_of()), values_of(1)
    size = serializer.estimate_serialized_size(DESC)

    def store(_: int) -> int:
        blob = object_of(torch.zeros(size, dtype=torch.uint8))
        return int(serializer.serialize(object_of(whole), blob, key_of(1)))

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(store, range(64))]
    words = [one.getMessage().split() for one in caplog.records]
    said = sorted((int(one[0]), int(one[2])) for one in words)
    assert [one[0] for one in said] == [1, 2, 4, 8, 16, 32, 64]
    assert all(instead <= tried <= 64 for instead, tried in said) and said[-1][1] == 64


def test_the_serde_decodes_nothing_of_another_basis(basis_of: Callable[..., Any]) -> None:
    blob, basis = encoded("kvt", prompt_part(3), key_of(1), basis_of()), basis_of()
    refused(blob, "kvt", basis=basis_of(seed=7), said="another one than the basis .*org/learned")
    refused(blob, "kv8", said="shape, dtype or codec")
    refused(blob, "kvt", dtype=torch.float16, basis=basis, said="shape, dtype or codec")
    refused(blob, "kvt", key=key_of(2), basis=basis, said="of another key")
    refused(object_of(blob.tensor[:-1]), "kvt", basis=basis, said="head of an object is damaged")
    refused(encoded("k8v4", values_of(1), key_of(1)), "kvt", basis=basis)


@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(at=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_a_flipped_bit_of_kvt_is_not_decoded(
    basis_of: Callable[..., Any], at: int, bit: int
) -> None:
    blob = encoded("kvt", prompt_part(3), key_of(1), basis_of())
    blob.tensor[at % blob.tensor.numel()] ^= 1 << bit
    refused(blob, "kvt", basis=basis_of())


def test_nothing_is_stored_that_no_codec_holds(basis_of: Callable[..., Any]) -> None:
    values = prompt_part(3)
    values[1, 2, 3, 4] = float("nan")
    with pytest.raises(ConfigError, match="cannot hold"):
        encoded("kvt", values, key_of(1), basis_of())


@pytest.mark.parametrize("shape", [(2, LAYERS, 64, DIM), (2, 2, 64, HEADS * DIM)])
def test_objects_of_other_shapes_do_not_fit(
    basis_of: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    desc = api.MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])
    serializer = door.FlowKVSerializer("kvt", 0, basis_of())
    with pytest.raises(ConfigError, match=r"the basis .*org/learned .*parallelism"):
        serializer.estimate_serialized_size(desc)
    with pytest.raises(ConfigError, match="head_dim"):
        door.FlowKVSerializer("kvt", 32, basis_of()).estimate_serialized_size(DESC)


def test_a_basis_that_is_not_there(tmp_path: Path) -> None:
    options: dict[str, Any] = {"codec": "kvt", "basis": str(tmp_path / "none")}
    with pytest.raises(ConfigError, match="flowkv calibrate"):
        create_serde_processor(SerdeConfig("flowkv", options))
