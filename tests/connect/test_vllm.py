"""vLLM's door: against vLLM itself where it is installed, else against fakes of its signatures."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowkv.data import tiny_path
from flowkv.sim import generate, read_trace
from flowkv.testing import FlakyTier
from tests.inside import ConfigError, Faults, KeyedPolicy, compiling, fingerprint

REAL = importlib.util.find_spec("vllm") is not None
if not REAL:
    from tests.connect import vllm_fakes

    vllm_fakes.install()

from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402

door = importlib.import_module("flowkv.connect.vllm")

ROWS, ROW_BYTES, LAYERS, TOKENS = 24, 8 * 4096, 4, 16
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
needs_vllm = pytest.mark.skipif(not REAL, reason="vLLM is not installed")


def spec(model: str, **changes: Any) -> Any:
    """As much of vLLM's specification as anything here looks at."""
    group = SimpleNamespace(
        group_id=changes.get("group_id", 0),
        tokens_per_block=TOKENS,
        layer_names=tuple(map(str, range(LAYERS))),
    )
    sizes = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size"), 1)
    config = SimpleNamespace(
        groups=(group,),
        model=SimpleNamespace(name=model, dtype=changes.get("dtype", "float32")),
        parallel=SimpleNamespace(rank=0, is_parallelism_agnostic=False, **sizes),
        cache=SimpleNamespace(tokens_per_hash=TOKENS),
        kv_cache_layout=changes.get("layout", "LBHNC"),
        canonical_layout=False,
        replicated_layout=False,
    )
    return SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        tokens_per_block=(TOKENS,),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )


class Engine:
    """Rows of a CPU cache and one tier below them, used as vLLM's manager uses them."""

    def __init__(self, tmp_path: Path, places: Any = None, model: Path | None = None, **more: Any):
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
        model = model or weights(tmp_path)
        changes = {name: more.pop(name) for name in ("dtype", "layout", "group_id") if name in more}
        self.tier = door.FlowKVTier(
            spec(str(model), **changes),
            memoryview(self.rows),
            "FlowKVTier",
            places=places or f"disk:{tmp_path}/kv:32MiB",
            **more,
        )
        self.jobs = 0

    def transfer(self, keys: Sequence[bytes], context: Any, *, load: bool) -> Any:
        self.jobs += 1
        rows = np.arange(len(keys))
        if not load:
            for row, key in enumerate(keys):
                self.rows[row] = content(key)
        else:
            self.rows[: len(keys)] = 0
        job = TransferJob(self.jobs, keys, rows, load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        end = time.monotonic() + 60
        while not (done := list(self.tier.get_finished_jobs())):
            assert time.monotonic() < end
            time.sleep(0.001)
        (result,) = done
        assert result.job_id == self.jobs
        if load:
            good = set(keys if result.success else result.successful_keys or ())
            for row, key in enumerate(keys):
                assert key not in good or (self.rows[row] == content(key)).all(), "WRONG BYTES"
        return result

    def store(self, keys: Sequence[bytes], context: Any | None = None) -> Any:
        return self.transfer(keys, context or request("w", keys), load=False)

    def load(self, keys: Sequence[bytes], context: Any) -> Any:
        return self.transfer(keys, context, load=True)

    def lookups(self, keys: Sequence[bytes], context: Any) -> list[Any]:
        self.tier.on_new_request(context)
        return [self.tier.lookup(key, context) for key in keys]


def content(key: bytes) -> np.ndarray:
    return np.frombuffer(random.Random(key).randbytes(ROW_BYTES), np.uint8)


def chain(name: object, n: int) -> list[bytes]:
    keys, last = [], str(name).encode()
    for _ in range(n):
        last = hashlib.sha256(last).digest()
        keys.append(last + bytes(4))
    return keys


def request(name: str, keys: Sequence[bytes], **params: Any) -> Any:
    context = ReqContext(name, kv_transfer_params=params or None)
    for i, key in enumerate(keys):
        context.set_offload_key_position(key, (i + 1) * TOKENS)
    return context


def weights(tmp_path: Path, content: bytes = b"weights") -> Path:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "model.safetensors").write_bytes(content)
    return model


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def new(**more: Any) -> Engine:
        engines.append(Engine(tmp_path, **more))
        return engines[-1]

    yield new
    for engine in engines:
        engine.tier.shutdown()


def restarted(engine: Engine, make: Callable[..., Engine], **more: Any) -> Engine:
    engine.tier.keeper.close()
    return make(**more)


def test_a_later_process_finds_what_was_stored(make: Callable[..., Engine]) -> None:
    engine, keys = make(), chain("a", 8)
    assert engine.lookups(keys, request("r", keys)) == [MISS] * 8
    assert engine.store(keys).success
    engine = restarted(engine, make)
    context = request("r", keys)
    assert engine.lookups(keys, context) == [HIT] * 8
    result = engine.load(keys, context)
    assert result.success
    assert result.transfer_bytes == 8 * ROW_BYTES
    engine.tier.on_request_finished(context)


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"layout": "LBNHC"}, {"weights": "b"}, {"revision": "2"}]
)
def test_bytes_of_another_model_are_not_found(
    make: Callable[..., Engine], other: dict[str, str]
) -> None:
    engine, keys = make(), chain("a", 2)
    engine.store(keys)
    engine = restarted(engine, make, **other)
    assert engine.lookups(keys, request("r", keys)) == [MISS] * 2


def test_every_byte_of_the_weights_counts(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine, keys = make(), chain("a", 2)
    engine.store(keys)
    engine.tier.keeper.close()
    (tmp_path / "tuned").mkdir()
    engine = make(model=weights(tmp_path / "tuned", b"weightz"))
    assert engine.lookups(keys, request("r", keys)) == [MISS] * 2


def test_how_the_weights_are_used_counts(make: Callable[..., Engine], tmp_path: Path) -> None:
    """Its configuration and its code decide what K and V are as much as the weights do."""
    keys = chain("a", 2)
    (tmp_path / "tuned").mkdir()
    model = weights(tmp_path / "tuned", b"weights")
    home = model if model.is_dir() else model.parent
    for name, text in [("config.json", "{}"), ("config.json", '{"rope": 2}'), ("model.py", "1")]:
        (home / name).write_text(text)
        engine = make(model=model)
        assert engine.lookups(keys, request("r", keys)) == [MISS] * 2, name
        engine.store(keys)
        engine.tier.keeper.close()
    engine = make(model=model)
    assert engine.lookups(keys, request("r", keys)) == [HIT] * 2


def test_weights_that_are_not_here_need_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be found"):
        Engine(tmp_path, model=Path("nobody/has-this"))


def test_a_name_of_several_revisions_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = ModuleType("huggingface_hub")
    main, other = (tmp_path / "snapshots" / name for name in ("main", "other"))
    hub.snapshot_download = lambda name, *, revision, local_files_only: str(  # type: ignore[attr-defined]
        tmp_path / "snapshots" / (revision or "main")
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    for folder in (main, other):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(folder.name.encode())
    with pytest.raises(ConfigError, match="several revisions"):
        fingerprint("org/model")
    assert fingerprint("org/model", "main") != fingerprint("org/model", "other")
    shutil.rmtree(other)
    assert fingerprint("org/model") == fingerprint("org/model", "main")


def test_events_tell_what_came_and_what_went(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(enable_kv_events=True, places=f"disk:{tmp_path / 'small'}:2MiB", policy="lru")
    there: set[bytes] = set()
    for n in range(120):
        (key,) = chain(n, 1)
        engine.store([key])
        for event in engine.tier.take_events():
            assert set(event.keys).isdisjoint(there) != event.removed
            there = there - set(event.keys) if event.removed else there | set(event.keys)
    context = request("r", sorted(there))
    assert 0 < len(there) < 120
    assert engine.lookups(sorted(there), context) == [HIT] * len(there)


def test_what_is_asked_for_is_recorded(make: Callable[..., Engine], tmp_path: Path) -> None:
    """Requests that vLLM serves from its own memory, too."""
    engine = make(record=str(tmp_path / "monday.trace"))
    prompts = [chain("a", 6), chain("a", 6), [*chain("a", 3), *chain("b", 2)], []]
    for number, keys in enumerate(prompts):
        context = request(str(number), keys[:-2], flowkv_tenant="ann" if number == 2 else None)
        engine.tier.on_new_request(context)
        engine.tier.on_schedule_end(
            SimpleNamespace(new_req_ids=[str(number)], preempted_req_ids=[])
        )
        for spot, key in list(enumerate(keys))[-2:]:  # the answer comes
            context.set_offload_key_position(key, (spot + 1) * TOKENS)
        engine.tier.on_request_finished(context)
        engine.tier.on_request_finished(context)
    engine.tier.shutdown()
    trace = read_trace(tmp_path / "monday.trace")
    assert trace.block_tokens == TOKENS
    assert trace.blocks.tolist() == [*range(6), *range(6), 0, 1, 2, 6, 7]
    assert trace.input_tokens.tolist() == [4 * TOKENS, 4 * TOKENS, 3 * TOKENS]
    assert trace.output_tokens.tolist() == [2 * TOKENS] * 3
    assert trace.tenants.tolist() == [0, 0, 1]


def test_a_recording_that_cannot_be_written_stops_nothing(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine, keys = make(record="/dev/full"), chain("a", 4)
    for number in range(5000):
        context = request(str(number), keys)
        engine.tier.on_new_request(context)
        engine.tier.on_request_finished(context)
    assert len([one for one in caplog.records if "/dev/full" in one.getMessage()]) == 1
    engine.store(keys)
    engine.tier.shutdown()


def test_after_a_reset_nothing_of_before_is_found(make: Callable[..., Engine]) -> None:
    """vLLM resets its cache when it gets other weights, and says no more about it."""
    engine, old, new = make(), chain("a", 4), chain("b", 4)
    engine.store(old)
    engine.tier.drain_jobs()
    assert engine.lookups(old, request("r", old)) == [MISS] * 4
    engine.store(new)
    assert engine.lookups(new, request("s", new)) == [HIT] * 4
    engine.tier.shutdown()
    later = make()
    assert later.lookups(old, request("r", old)) == [HIT] * 4
    assert later.lookups(new, request("s", new)) == [MISS] * 4


def test_groups_are_known_by_their_numbers(make: Callable[..., Engine]) -> None:
    """vLLM leaves out groups that are not offloaded."""
    engine = make(group_id=3, record="/dev/null")
    keys = [key[:-4] + (3).to_bytes(4, "big") for key in chain("a", 4)]
    assert engine.store(keys).success
    assert engine.load(keys, request("r", keys)).success


def test_hashes_must_last(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "seed", raising=False)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"of xxhash", raising=False)
    with pytest.raises(ConfigError, match="sha256_cbor"):
        make()


def test_a_damaged_chunk_is_a_miss_for_its_request_until_it_is_stored_again(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    engine, keys = make(), chain("a", 6)
    engine.store(keys)
    for slab in (tmp_path / "kv").glob("slab-*"):
        data = bytearray(slab.read_bytes())
        data[data.find(content(keys[3]).tobytes()) + 5000] ^= 1
        slab.write_bytes(data)
    context = request("r", keys)
    assert engine.lookups(keys, context) == [HIT] * 6
    result = engine.load(keys, context)
    assert not result.success
    assert set(result.successful_keys) == {*keys[:3], *keys[4:]}
    assert engine.lookups(keys, context) == [HIT] * 3 + [MISS] + [HIT] * 2
    engine.store(keys[3:4])
    assert engine.tier.lookup(keys[3], context) is MISS  # nobody promotes it for ever
    assert engine.lookups(keys, request("other", keys)) == [HIT] * 6
    engine.tier.on_request_finished(context)
    assert engine.tier.lookup(keys[3], context) is HIT


def test_a_tier_that_fails_costs_a_miss_each(make: Callable[..., Engine]) -> None:
    engine, keys = make(gate=False), chain("a", 4)
    engine.store(keys)
    (level,) = engine.tier.keeper._levels
    level.tier = FlakyTier(level.tier, 1, Faults(fail=1.0))
    time.sleep(0.3)  # the thread that waits for answers of the tier before
    context = request("r", keys)
    assert engine.lookups(keys, context) == [HIT] * 4
    result = engine.load(keys, context)
    assert not result.success
    assert result.successful_keys is None
    assert engine.lookups(keys, context) == [MISS] * 4


def test_what_takes_longer_than_computing_is_declined(make: Callable[..., Engine]) -> None:
    engine, keys = make(), chain("a", 4)
    engine.store(keys)
    gate, (name,) = engine.tier.keeper.gate, engine.tier.keeper.gate.rates
    for _ in range(8):
        gate.loaded(name, ROW_BYTES, 1.0)
        gate.computed(TOKENS, 0.1)
    assert engine.lookups(keys, request("r", keys)) == [MISS] * 4
    for _ in range(30):
        gate.loaded(name, ROW_BYTES, 0.01)
    assert engine.lookups(keys, request("s", keys)) == [HIT] * 4


def test_computing_is_measured_from_what_is_stored(make: Callable[..., Engine]) -> None:
    engine, keys = make(), chain("a", 4)
    context = request("r", keys)
    assert engine.lookups(keys, context) == [MISS] * 4
    engine.tier.on_schedule_end(SimpleNamespace(new_req_ids=["r"], preempted_req_ids=[]))
    time.sleep(0.02)
    engine.store(keys, context)
    assert 0.02 / (4 * TOKENS) <= engine.tier.keeper.gate.seconds_per_token < 5


def test_tenants_have_quotas(make: Callable[..., Engine]) -> None:
    engine = make(quotas={"a": "256KiB"}, policy="lru")
    for n in range(12):
        keys = chain(n, 1)
        engine.store(keys, request(f"w{n}", keys, flowkv_tenant="a"))
    found = [engine.lookups(chain(n, 1), request(f"r{n}", chain(n, 1)))[0] for n in range(12)]
    assert 4 <= found.count(HIT) <= 8
    assert found[-1] is HIT


@pytest.mark.parametrize("clock", [nullcontext, compiling.around], ids=["goes", "stands"])
def test_a_full_directory_keeps_the_new(
    make: Callable[..., Engine], tmp_path: Path, clock: Callable[[], Any]
) -> None:
    engine = make(places=[f"disk:{tmp_path}/kv:2MiB"], policy="lru")
    with clock():  # while something else is compiled, what came first goes first all the same
        for n in range(20):
            assert engine.store(chain(n, 4)).success
    assert engine.lookups(chain(19, 4), request("r", chain(19, 4))) == [HIT] * 4
    assert engine.lookups(chain(0, 4), request("s", chain(0, 4))) == [MISS] * 4


def test_it_tells_what_happened(make: Callable[..., Engine]) -> None:
    engine, keys = make(enable_kv_events=True), chain("a", 3)
    engine.store(keys)
    (event,) = engine.tier.take_events()
    assert (list(event.keys), event.removed) == (keys, False)
    assert not list(engine.tier.take_events())
    defined = door.FlowKVTier.build_metric_definitions({})
    stats = engine.tier.get_stats()
    told = set(stats.data["data"]) if REAL else {name for name, _ in stats.values}
    assert told <= set(defined)
    assert "vllm:flowkv_answers" in told
    engine.tier.touch(keys, request("r", keys))
    engine.tier.drain_jobs()


# ---- hints


class Late:
    """The clock of a keeper, some seconds on."""

    def __init__(self, clock: Any, seconds: float) -> None:
        self._clock, self._ns = clock, round(seconds * 1e9)

    def now_ns(self) -> int:
        return int(self._clock.now_ns()) + self._ns


def load_code(access: Callable[[], object], policy: Any) -> None:
    """Use a place until its policy answers: before, ranks have no effect."""
    end = time.monotonic() + 240
    while getattr(policy, "plain", False):
        assert time.monotonic() < end
        access()
        time.sleep(0.005)


def ready(engine: Engine) -> Engine:
    (level,) = engine.tier.keeper.levels
    policy, other = level.book.policy, request("other", [])
    accounts = getattr(policy, "_accounts", {})
    for one in [account.policy for account in accounts.values()] or [policy]:
        load_code(lambda: engine.tier.touch([bytes(36)], other), one)
    return engine


def flood(engine: Engine, chains: Sequence[int] = range(30), **params: Any) -> None:
    for n in chains:
        keys = chain(f"flood {n}", 4)
        context = request(f"flood {n}", keys, **params)
        engine.tier.on_new_request(context)
        engine.store(keys, context)
        engine.tier.on_request_finished(context)


def found(engine: Engine, keys: Sequence[bytes]) -> int:
    context = request("found", keys)
    hits = engine.lookups(keys, context).count(HIT)
    engine.tier.on_request_finished(context)
    return hits


def tokens_of(engine: Engine) -> dict[str, int]:
    return dict(engine.tier._hints.tokens)


def small(make: Callable[..., Engine], tmp_path: Path, **more: Any) -> Engine:
    """An engine with room for about 12 chains of 4 chunks."""
    return ready(make(places=f"disk:{tmp_path}/kv:2MiB", **{"policy": "lru", **more}))


@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "auto"])
def test_a_hint_keeps_chunks_through_a_flood_for_its_time(
    make: Callable[..., Engine], tmp_path: Path, policy: str
) -> None:
    engine = small(make, tmp_path, policy=policy)
    kept, plain = chain("kept", 4), chain("plain", 4)
    context = request("kept", kept, flowkv=[{"stop": 3 * TOKENS, "ttl": "1h"}])
    engine.lookups(kept, context)
    engine.store(kept, context)
    engine.tier.on_request_finished(context)
    engine.store(plain)
    flood(engine)
    assert found(engine, kept) in (3, 4 if policy == "auto" else 3)  # it learns by the time
    assert found(engine, plain) < 3
    assert tokens_of(engine) == {"created": 3 * TOKENS, "dropped": 0}
    context = request("again", kept, flowkv={"ttl": "5m"})
    engine.lookups(kept[:3], context)
    engine.load(kept[:3], context)
    engine.tier.on_request_finished(context)
    assert tokens_of(engine)["read"] == 3 * TOKENS
    engine.tier.keeper._clock = Late(engine.tier.keeper._clock, 3700)
    flood(engine, range(30, 60))
    assert found(engine, kept) < 3


def test_a_hint_counts_for_what_is_stored_already(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    """Also where the request takes its chunks from vLLM's memory, so that no job names them."""
    for name, used in [("loaded", True), ("near", False)]:
        engine, keys = small(make, tmp_path), chain(name, 4)
        engine.store(keys)
        context = request(name, keys, flowkv={"priority": 80})
        if used:
            assert engine.lookups(keys, context) == [HIT] * 4
            engine.load(keys, context)
        else:
            engine.tier.on_new_request(context)
        engine.tier.on_request_finished(context)
        flood(engine)
        assert found(engine, keys) == 4, name
        assert tokens_of(engine).get("read", 0) == used * 4 * TOKENS
        engine.tier.shutdown()


def test_a_low_priority_goes_first(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine, last = small(make, tmp_path), chain("last", 4)
    flood(engine, range(9))
    engine.store(last, request("last", last, flowkv={"priority": 0}))
    flood(engine, range(9, 14))
    assert found(engine, last) == 0
    assert found(engine, chain("flood 4", 4)) == 4


def test_hints_take_nothing_from_a_reserve(make: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make(
        places=f"disk:{tmp_path}/kv:2MiB",
        policy="lru",
        quotas={"ann": "600KiB:2MiB", "bob": ":2MiB"},
    )
    mine = [chain(f"ann {n}", 4) for n in range(3)]
    for n, keys in enumerate(mine):
        engine.store(keys, request(f"ann {n}", keys, flowkv_tenant="ann"))
    other = chain("bob", 1)
    engine.store(other, request("bob", other, flowkv_tenant="bob"))
    ready(engine)
    flood(engine, flowkv_tenant="bob", flowkv={"priority": 100})
    assert [found(engine, keys) for keys in mine] == [4, 4, 4]
    assert found(engine, chain("flood 29", 4)) == 4


def test_a_bad_hint_is_reported_once_and_stops_nothing(
    make: Callable[..., Engine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door.vllm_cache, "_bad_hints", iter(range(9)))
    engine, keys = make(), chain("a", 2)
    for n, value in enumerate([{"ttl": "1 day"}, "always", {"priority": 1e9}]):
        context = request(str(n), keys, flowkv=value)
        engine.lookups(keys, context)
        assert engine.store(keys, context).success
        engine.tier.on_request_finished(context)
    assert tokens_of(engine) == {"created": 0, "dropped": 3}
    (warning,) = [one for one in caplog.records if "hint" in one.getMessage()]
    assert "1 day" in warning.getMessage()
    told = door.FlowKVTier.build_metric_definitions({})["vllm:flowkv_hinted_tokens"]
    assert told.labelnames == ("tier", "what")


def test_hints_hold_in_vllms_own_memory() -> None:
    policy = door.flowkv_lru(40)
    other = request("other", [])
    load_code(lambda: policy.on_store_miss([bytes(36)], other), policy._policy.policy)
    for name in ("kept", "plain", "renewed"):
        insert(policy, name, **({"flowkv": {"ttl": "1h"}} if name == "kept" else {}))
    renewed = chain("renewed", 4)
    again = request("again", renewed, flowkv={"ttl": "1h"})
    policy.on_request_finished([renewed], set(), set(), again)  # used on the device
    for n in range(20):
        insert(policy, f"flood {n}")
    there = {name: [policy.get(key) is not None for key in chain(name, 4)] for name in
             ("kept", "plain", "renewed")}  # fmt: skip
    assert there == {"kept": [True] * 4, "plain": [False] * 4, "renewed": [True] * 4}


def insert(policy: Any, name: str, **params: Any) -> None:
    keys = chain(name, 4)
    context = request(name, keys, **params)
    policy.on_store_miss(keys, context)
    if len(policy._chunks) > 36:
        assert policy.evict(4, set(keys))
    for number, key in enumerate(keys):
        chunk = ChunkStatus(number)
        chunk.ref_cnt = 0
        policy.insert(key, chunk)
    policy.on_request_finished([keys], set(keys), set(), context)


@needs_vllm
def test_hints_arrive_through_vllms_own_requests(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    """From the arguments of `generate` to the tier, by vLLM's own requests and contexts."""
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        _create_req_context,
    )
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
    from vllm.v1.request import Request

    def arrived(name: str, keys: Sequence[bytes], params: Any, hints: Any) -> Any:
        core = EngineCoreRequest(
            request_id=name, prompt_token_ids=[1] * TOKENS * len(keys), mm_features=None,
            sampling_params=SamplingParams(extra_args={"kv_transfer_params": params}),
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
            data_parallel_rank=None, kv_hints=hints,
        )  # fmt: skip
        context = _create_req_context(Request.from_engine_core_request(core, block_hasher=None))
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, (i + 1) * TOKENS)
        return context

    retain = KvHintAction(
        action_id="1",
        action_type="kv.retain",
        action_version="1.0",
        payload={"directives": [{"start": 0, "end": 2 * TOKENS, "priority": 60}]},
    )
    hints = KvHintsEnvelope(protocol_version="0.1", message_id="m", actions=[retain])
    asked = {"params": ({"flowkv": {"ttl": "1h"}}, None), "hints": (None, hints), "": (None, None)}
    engine = small(make, tmp_path)
    for name, (params, said) in asked.items():
        context = arrived(name, chain(name, 4), params, said)
        engine.lookups(chain(name, 4), context)
        engine.store(chain(name, 4), context)
        engine.tier.on_request_finished(context)
    flood(engine)
    assert [found(engine, chain(name, 4)) for name in asked] == [4, 2, 0]


# ---- policies


def test_policies_are_made_by_name() -> None:
    assert door.flowkv_lfu_ttl.policy_name == "lfu-ttl"
    with pytest.raises(AttributeError):
        door.flowkv_nothing  # noqa: B018


@pytest.mark.parametrize("name", ["lru", "arc", "lfu_ttl", "auto"])
def test_a_policy_keeps_what_is_in_use(name: str) -> None:
    policy = getattr(door, f"flowkv_{name}")(8)
    keys = chain("a", 8)
    context = request("r", keys)
    policy.on_store_miss(keys, context)
    for i, key in enumerate(keys):
        policy.insert(key, ChunkStatus(i))
    assert policy.evict(1, set()) is None  # being stored
    for key in keys:
        policy.get(key).ref_cnt = 0
        policy.mark_evictable(key)
    policy.mark_non_evictable(keys[7])
    assert policy.evict(8, set()) is None
    gone = policy.evict(2, {keys[0]})
    assert len(gone) == 2
    assert not {key for key, _ in gone} & {keys[0], keys[7]}
    assert all(policy.get(key) is None for key, _ in gone)
    policy.on_request_finished([keys], set(), {keys[0]}, context)
    policy.clear()
    assert policy.get(keys[0]) is None


@needs_vllm
def test_same_rule_same_decisions_as_vllm() -> None:
    rates = {name: hit_rate(name) for name in ("lru", "flowkv_lru", "flowkv_auto")}
    assert rates["flowkv_lru"] == pytest.approx(rates["lru"], abs=0.01)
    assert rates["flowkv_auto"] >= rates["lru"]


@needs_vllm
@pytest.mark.parametrize(("kind", "requests"), [("chat", 600), ("mix", 300)])
def test_auto_knows_what_lru_would_have_had(
    kind: str, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of requests as the simulator tells it: all blocks, once, before what is new."""
    trace, told = generate(kind, requests=requests, seed=3), [0]
    names = [chain(f"{kind} {block}", 1)[0] for block in range(trace.unique)]
    ends = zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)
    prompts = [[names[block] for block in trace.blocks[a:b].tolist()] for a, b in ends]
    timed = list(zip(trace.times_ns.tolist(), prompts, strict=True))
    access, books = KeyedPolicy.access, list[KeyedPolicy]()

    def counted(book: KeyedPolicy, now_ns: int, keys: list[bytes]) -> None:
        books.append(book)
        told[0] += sum(key in book for key in keys)
        access(book, now_ns, keys)

    monkeypatch.setattr(KeyedPolicy, "access", counted)
    found = {}
    for name in ("flowkv_lru", "flowkv_auto"):
        told[0] = 0
        found[name] = share_of_hits(name, timed, trace.unique // 20), told[0]
    (lru, lru_hits), (auto, auto_hits) = found.values()
    assert auto >= lru
    surplus = books[-1].policy.surplus
    assert surplus == pytest.approx(auto_hits - lru_hits, abs=0.03 * lru_hits)


def hit_rate(policy: str, capacity: int = 200, requests: int = 600) -> float:
    """Of popular prefixes, and a scan every seventh request."""
    rng = random.Random(1)
    sizes = [rng.randint(2, 24) for _ in range(150)]
    popular = [1 / (n + 1) for n in range(150)]
    prompts = []
    for number in range(requests):
        (doc,) = rng.choices(range(150), popular) if number % 7 else (1000 + number,)
        prompts.append((10**9 * number, chain(doc, sizes[doc] if doc < 150 else 20)))
    return share_of_hits(policy, prompts, capacity)


def share_of_hits(policy: str, prompts: list[tuple[int, list[bytes]]], capacity: int) -> float:
    """Of chunks, in vLLM's own manager, of prompts and their times."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    module = "flowkv.connect.vllm" if policy.startswith("flowkv") else None
    manager, hits, total = CPUOffloadingManager(capacity, policy, module), 0, 0
    for number, (now_ns, keys) in enumerate(prompts):
        with pytest.MonkeyPatch.context() as clock:
            at = staticmethod(lambda now_ns=now_ns: now_ns)
            clock.setattr(door.FlowKVCachePolicy, "clock_ns", at)
            context = request(str(number), keys)
            manager.on_new_request(context)
            found = 0
            while found < len(keys) and manager.lookup(keys[found], context) is HIT:
                found += 1
            if found:
                manager.prepare_load(keys[:found], context)
                manager.complete_load(keys[:found], context)
            out = manager.prepare_store(keys, context)
            if out is not None and out.keys_to_store:
                manager.complete_store(out.keys_to_store, context)
            manager.on_request_finished(context)
        hits, total = hits + found, total + len(keys)
    return hits / total


@needs_vllm
def test_nothing_abstract_is_left() -> None:
    assert not door.FlowKVTier.__abstractmethods__
    assert not door.flowkv_auto.__abstractmethods__


# ---- vLLM itself, chunks at one to two bits a value


@needs_vllm
@pytest.mark.timeout(550)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs lay out keys in other ways")
def test_a_fresh_engine_answers_from_coded_chunks(tmp_path: Path) -> None:
    """vLLM's own scheduler, tiers and model; its copies to host memory are of `vllm_cold`."""
    random_ids = random.Random(1)

    def ascii_ids(count: int) -> list[int]:
        return [random_ids.randint(32, 126) for _ in range(count)]

    def python(*words: str) -> str:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    (tmp_path / "text.txt").write_bytes(bytes(ascii_ids(9 * 256)))
    given = "--model", str(tiny_path()), "--text", str(tmp_path / "text.txt")
    basis = str(tmp_path / "basis.kvt")
    python("flowkv.cli", "calibrate", *given, "--out", basis, "--kl", "0.02")
    tier = {"type": "FlowKVTier", "module_path": "bench.engines.tier", "gate": False}
    tier |= {"places": [f"disk:{tmp_path}/kv:1GiB"], "codec": "kvt", "basis": basis}
    said = {"model": str(tiny_path()), "heads": 2, "tier": tier | {"load_deadline_s": 60.0}}
    words = "tests.connect.vllm_cold", json.dumps(said | {"prompts": [ascii_ids(1000)]})
    first, again = (json.loads(python(*words).partition("SAYS ")[2]) for _ in range(2))
    (exact,), (found,) = first["answers"], again["answers"]
    assert (exact["cached"], found["cached"]) == (0, 960)  # 15 chunks of 64 tokens
    values = 960 * 4 * 2 * 2 * 64  # layers, K and V, heads, dims
    assert first["coded"]["pages"] == 15
    assert 8 * first["coded"]["coded_bytes"] / values < 2
    assert again["coded"]["decoded_bytes"] == 4 * values
    assert found["tokens"][0] == exact["tokens"][0]
    assert found["logs"] != exact["logs"]  # they are of decoded keys and values
    same = [a == b for a, b in zip(exact["tokens"], found["tokens"], strict=True)]
    count = [*same, False].index(False)
    assert found["logs"][:count] == pytest.approx(exact["logs"][:count], abs=0.5)


def test_the_keeper_needs_neither_torch_nor_an_engine() -> None:
    program = "import sys, flowkv.connect; print({'torch', 'vllm'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
