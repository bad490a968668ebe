"""SGLang's door, against SGLang's own classes; where it is not installed, CI has it installed."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowkv.connect import Keeper
from flowkv.policy import make_policy
from flowkv.testing import FlakyTier
from tests.clock import together
from tests.connect.far import flip, stuck_tier
from tests.inside import ConfigError, Faults, HostTier

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

sg = importlib.import_module("tests.connect.sglang_parts")  # stands in for what SGLang lacks here

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

door = importlib.import_module("flowkv.connect.sglang")
COPIED, IN_PLACE = "layer_first", "page_first"

# ---- SGLang's own controller, in processes of its own


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    made: dict[tuple[str, bool], Path] = {}

    def of(layout: str, v1: bool) -> Path:
        if (layout, v1) not in made:
            directory = tmp_path_factory.mktemp("kv")
            command = f"from tests.connect.sglang_parts import write; write({str(directory)!r}, "
            command += f"{layout!r}, {v1})"
            subprocess.run([sys.executable, "-c", command], check=True, timeout=240)
            made[layout, v1] = directory
        return made[layout, v1]

    return of


@pytest.fixture
def control(tmp_path: Path, written: Callable[[str, bool], Path]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def one(layout: str, v1: bool, damaged: int | None = None, **options: Any) -> Any:
        directory = shutil.copytree(written(layout, v1), tmp_path / "kv")
        if damaged is not None:
            flip(directory, sg.page_of(damaged, sg.host_pool(layout)))
        made.append(sg.controller(sg.config(directory, v1=v1, **options), layout))
        return made[-1]

    yield one
    for each in made:
        each.detach_storage_backend()


each_way = pytest.mark.parametrize(
    ("layout", "v1"), [(COPIED, False), (COPIED, True), (IN_PLACE, True)]
)


@each_way
def test_another_process_finds_all_of_it(
    control: Callable[..., Any], layout: str, v1: bool
) -> None:
    assert sg.restored(control(layout, v1)) == (sg.TOKENS, True)


@each_way
@pytest.mark.parametrize("damaged", [0, 5])
def test_a_flipped_bit_stops_at_its_page(
    control: Callable[..., Any], layout: str, v1: bool, damaged: int
) -> None:
    one = control(layout, v1, damaged=damaged)
    assert sg.restored(one) == (damaged * sg.PAGE, True)
    assert one.storage_backend.keeper.counts["miss:digest"] == 1


@pytest.mark.parametrize("change", [{"weights": "commit 2"}, {"revision": "tuned"}])
def test_other_weights_find_nothing(control: Callable[..., Any], change: dict[str, str]) -> None:
    assert sg.restored(control(IN_PLACE, True, **change)) == (0, True)


def test_sglangs_own_fault_injector_brings_no_wrong_page(
    control: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.01),
    ):
        one = control(IN_PLACE, True)
    assert type(one.storage_backend).__name__ == "HiCacheStorageFailureInjector"
    hits = 0
    for _ in range(24):
        tokens, right = sg.restored(one)
        assert right, "WRONG BYTES"
        hits += tokens > 0
        sg.backed_up(one)
        one.mem_pool_host.clear()
    assert 0 < hits < 24


# ---- call by call


class Made:
    """A storage as SGLang's factory makes it, over a host pool."""

    def __init__(self, extra: dict[str, Any], layout: str, pool: Any = None, **of: Any) -> None:
        self.pool = pool or sg.host_pool(layout)
        self.storage = StorageBackendFactory.create_backend(
            "dynamic", sg.storage_config(extra, **of), self.pool
        )
        self.storage.register_mem_pool_host(self.pool)

    def put(self, names: Sequence[int], before: Sequence[int] = ()) -> list[bool]:
        at = self.pool.alloc(len(names) * sg.PAGE)
        sg.fill(self.pool, at, names)
        keys, above = keys_of(names), HiCacheStorageExtraInfo(prefix_keys=keys_of(before))
        done: list[bool] = self.storage.batch_set_v1(keys, at, above)
        self.pool.free(at)
        return done

    def get(self, names: Sequence[int]) -> list[bool]:
        at = self.pool.alloc(len(names) * sg.PAGE)
        good: list[bool] = self.storage.batch_get_v1(keys_of(names), at)
        for i, (n, there) in enumerate(zip(names, good, strict=True)):
            assert not there or sg.holds(self.pool, at[i * sg.PAGE :], [n]), "WRONG BYTES"
        self.pool.free(at)
        return good


def keys_of(names: Sequence[int]) -> list[str]:
    return [f"{n:064x}" for n in names]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Made]]:
    made: list[Made] = []

    def one(layout: str = IN_PLACE, v1: bool = True, pool: Any = None, **options: Any) -> Made:
        of = {name: options.pop(name) for name in list(options) if name.endswith(("rank", "size"))}
        made.append(Made(sg.config(tmp_path / "kv", v1=v1, **options), layout, pool, **of))
        return made[-1]

    yield one
    for each in made:
        each.storage.close()
        each.storage.close()  # safe again


def over(monkeypatch: pytest.MonkeyPatch, *tiers: Any) -> Keeper:
    keeper = Keeper(tiers, lambda kind, capacity_bytes: make_policy("lru"))
    monkeypatch.setattr(door, "open_keeper", lambda *places, **options: keeper)
    return keeper


def test_nothing_abstract_is_left() -> None:
    assert issubclass(door.FlowKVStorage, HiCacheStorage)
    assert not door.FlowKVStorage.__abstractmethods__
    asked = {name for name in vars(HiCacheStorage) if name.startswith(("batch_", "register_"))}
    assert asked <= set(vars(door.FlowKVStorage))


@pytest.mark.parametrize("layout", [COPIED, IN_PLACE, "page_first_direct"])
def test_pages_come_back(make: Callable[..., Made], layout: str) -> None:
    one = make(layout)
    assert one.put(range(4)) == [True] * 4
    assert one.get([3, 9, 0]) == [True, False, True]
    assert one.storage.exists(keys_of([2])[0])
    assert one.storage.batch_exists(keys_of([0, 1, 9, 2])) == 2
    assert one.storage.batch_exists(keys_of([9, 0])) == 0


@pytest.mark.parametrize("layout", [IN_PLACE, "page_first_direct"])
def test_pages_of_few_runs_are_not_copied(
    make: Callable[..., Made], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(layout)
    at = one.pool.alloc(2 * sg.PAGE)
    sg.fill(one.pool, at, range(2))

    def copy(*args: Any) -> None:
        raise AssertionError("a copy")

    monkeypatch.setattr(one.pool, "get_data_page", copy)
    monkeypatch.setattr(one.pool, "set_from_flat_data_page", copy)
    assert one.storage.batch_set_v1(keys_of(range(2)), at) == [True] * 2
    assert one.storage.batch_get_v1(keys_of(range(2)), at) == [True] * 2


def test_the_flat_interface(make: Callable[..., Made]) -> None:
    storage, pool = (one := make(COPIED, v1=False)).storage, one.pool
    pages, keys = [sg.page_of(n, pool) for n in range(3)], keys_of(range(3))
    assert storage.batch_set(keys[:2], pages[:2])
    assert storage.set(keys[2], pages[2])
    assert not storage.set(keys[0], pages[0][:-1])  # no page
    target = pool.get_dummy_flat_data_page()
    assert storage.get(keys[1], target) is target
    assert torch.equal(target, pages[1])
    assert torch.equal(storage.get(keys[2]), pages[2])
    assert storage.get(keys_of([9])[0]) is None
    found = storage.batch_get([*keys, *keys_of([9])], [torch.empty_like(target) for _ in range(4)])
    assert [page is not None for page in found] == [True, True, True, False]
    assert all(torch.equal(page, right) for page, right in zip(found, pages, strict=False))


def test_flat_pages_where_pages_lie_as_they_are(make: Callable[..., Made]) -> None:
    with pytest.raises(ConfigError, match="interface_v1"):
        make(IN_PLACE, v1=True).storage.get(keys_of([1])[0])


@pytest.mark.parametrize(
    "change",
    [
        *({"weights": "commit 2"}, {"tp_size": 2, "places": "host:64MiB"}),
        *({"layout": "page_first_direct"}, {"pool": "bfloat16"}),
        *({"uses": {"kv_cache_dtype": "fp8_e5m2"}}, {"uses": {"revision": "tuned"}}),
    ],
)
def test_what_decides_the_bytes_is_in_their_names(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    over(monkeypatch, HostTier(64 << 20))
    one = make()
    one.put(range(2))
    if "pool" in change:
        change = {"pool": sg.host_pool(IN_PLACE, getattr(torch, change["pool"]))}
    assert make().get(range(2)) == [True] * 2
    if "uses" in change:
        monkeypatch.setattr(door, "_uses", lambda: dict(change["uses"]))
    other = make(**{name: value for name, value in change.items() if name != "uses"})
    assert other.storage.batch_exists(keys_of(range(2))) == 0
    assert other.get(range(2)) == [False] * 2


def test_bytes_that_nobody_explains_are_not_kept(make: Callable[..., Made]) -> None:
    """SGLang has one type of bytes for all kinds of FP8."""
    with pytest.raises(ConfigError, match="kv-cache-dtype"):
        make(pool=sg.host_pool(IN_PLACE, torch.uint8))
    make(pool=sg.host_pool(IN_PLACE, torch.uint8), revision="fp8_e4m3")


def test_sglangs_arguments_say_how_weights_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert door._uses() == {}  # no server
    args = SimpleNamespace(model_path=str(tmp_path), kv_cache_dtype="fp8_e4m3", quantization=None)
    monkeypatch.setattr(door.runtime_context, "get_server_args", lambda: args)
    assert door._uses() == {"model_path": str(tmp_path), "kv_cache_dtype": "fp8_e4m3"}
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    made = Made(sg.config(tmp_path / "kv", weights=""), IN_PLACE)  # served under another name
    weights = made.storage._weights
    made.storage.close()
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"draft")
    args.speculative_draft_model_path = str(draft)
    made = Made(sg.config(tmp_path / "kv", weights=""), IN_PLACE)
    made.storage.close()
    assert made.storage._weights.startswith(weights)
    assert made.storage._weights != weights


def test_ranks_have_directories_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank"):
        Made(sg.config(tmp_path), IN_PLACE, tp_rank=1, tp_size=2)
    extra = sg.config(tmp_path, places=f"disk:{tmp_path}/kv-{{rank}}:64MiB")
    made = [Made(extra, IN_PLACE, tp_rank=rank, tp_size=2) for rank in range(2)]
    for each in made:
        assert each.put([1]) == [True]
        each.storage.close()
    assert {path.name for path in tmp_path.iterdir()} == {"kv-0-0-0-0", "kv-1-0-0-0"}
    with pytest.raises(ConfigError, match="rank"):  # groups of attention with ranks of their own
        Made(sg.config(tmp_path), IN_PLACE, dp_rank=1)
    with pytest.raises(ConfigError, match="redis"):  # one of them alone stores
        Made(extra, IN_PLACE, tp_rank=1, tp_size=2, is_mla_model=True)


@pytest.fixture
def full(make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> tuple[Made, Any]:
    """One that holds all pages for which its place has room, and its keeper."""
    page = sg.host_pool(COPIED).get_dummy_flat_data_page().nbytes
    keeper = over(monkeypatch, HostTier(8 * HostTier(1 << 20).frame_bytes(page)))
    one = make(COPIED)
    one.put(range(8))
    return one, keeper


def test_what_exists_stays_until_it_is_loaded(full: tuple[Made, Any]) -> None:
    one, keeper = full
    assert one.storage.batch_exists(keys_of([0, 1, 99])) == 2
    one.put(range(10, 16))
    assert one.get([0, 1]) == [True] * 2
    one.put(range(20, 28))
    assert one.storage.batch_exists(keys_of([0])) == 0
    assert not keeper._holds


def test_what_two_wait_for_stays_until_both_have_it(full: tuple[Made, Any]) -> None:
    one, _ = full
    assert one.storage.batch_exists(keys_of([0])) == one.storage.batch_exists(keys_of([0])) == 1
    assert one.get([0]) == [True]
    one.put(range(10, 18))
    assert one.get([0]) == [True]
    one.put(range(20, 28))
    assert one.get([0]) == [False]


def test_pages_make_chains(make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs on others goes first, though it came last."""
    page = sg.host_pool(COPIED).get_dummy_flat_data_page().nbytes
    over(monkeypatch, HostTier(8 * HostTier(1 << 20).frame_bytes(page)))
    one = make(COPIED)
    one.put(range(4))
    one.put(range(4, 8), before=range(4))
    one.put([50, 51])
    assert one.get(range(8)) == [True] * 6 + [False] * 2


def test_a_tier_that_fails_brings_misses_and_no_wrong_byte(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(fail=0.1, lose=0.1, flip=0.1, latency_s=0.002)
    over(monkeypatch, FlakyTier(HostTier(256 << 20), 3, faults))
    for layout in (COPIED, IN_PLACE):
        one, hits = make(layout), 0
        for n in range(6):
            one.put(range(n, n + 6))
            hits += sum(one.get(range(n, n + 6)))
        assert 5 <= hits < 36


def test_a_place_that_hangs_costs_its_deadline(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    over(monkeypatch, stuck_tier())
    one = make(load_deadline_s=0.2, lookup_deadline_s=0.1)
    begun = time.monotonic()
    assert one.storage.batch_exists(keys_of([1, 2])) == 0
    assert one.get([1, 2]) == [False] * 2
    assert time.monotonic() - begun < 60.0


def test_threads_get_their_own_answers(make: Callable[..., Made]) -> None:
    one = make(COPIED)

    def work(first: int) -> None:
        for n in range(first, first + 6):
            assert one.put([n, n + 100]) == [True] * 2
            assert one.storage.batch_exists(keys_of([n, n + 100])) == 2
            assert one.get([n, n + 100, n + 900]) == [True, True, False]

    together(*(partial(work, 1000 * i) for i in range(4)))


def test_clearing_forgets_this_model_alone(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    over(monkeypatch, HostTier(64 << 20))
    one, other = make(), make(weights="commit 2")
    one.put([1])
    other.put([1])
    one.storage.clear()
    assert one.get([1]) == [False]
    assert other.get([1]) == [True]


def test_a_closed_storage_has_nothing(make: Callable[..., Made]) -> None:
    one = make()
    one.put([1])
    one.storage.close()
    assert one.get([1]) == [False]
    assert one.put([2]) == [False]
    assert one.storage.batch_exists(keys_of([1])) == 0


@pytest.mark.parametrize("options", [{"places": []}, {"places": "disk"}, {"polcy": "lru"}])
def test_an_option_that_is_none(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Made(sg.config(tmp_path, **options), IN_PLACE)


# ---- several pools: v2


def test_pools_beside_k_and_v(make: Callable[..., Made]) -> None:
    one = make()
    states = sg.host_pool(COPIED)
    one.storage.register_mem_host_pool_v2(one.pool, PoolName.KV)
    one.storage.register_mem_host_pool_v2(states, PoolName.SWA)
    one.storage.on_host_pools_registered()
    one.put(range(6))
    at = states.alloc(3 * sg.PAGE)
    sg.fill(states, at, [101, 103, 104])
    swa = PoolTransfer(name=PoolName.SWA, host_indices=at, keys=keys_of([1, 3, 4]))
    assert one.storage.batch_set_v2([swa]) == {PoolName.SWA: [True] * 3}
    sg.fill(states, at, [0, 0, 0])
    assert one.storage.batch_get_v2([swa]) == {PoolName.SWA: [True] * 3}
    assert sg.holds(states, at, [101, 103, 104])

    def there(policy: PoolHitPolicy, window: int = 1) -> tuple[int, dict[Any, int], list[int]]:
        ask = PoolTransfer(name=PoolName.SWA, keys=keys_of(range(window)), hit_policy=policy)
        found = one.storage.batch_exists_v2(keys_of(range(8)), [ask])
        return found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages

    kv, trailing = {PoolName.KV: 6}, PoolHitPolicy.TRAILING_PAGES
    assert there(trailing) == (5, {**kv, PoolName.SWA: 5}, [2, 4, 5])
    assert there(trailing, 2) == (5, {**kv, PoolName.SWA: 5}, [5])
    assert there(trailing, 3) == (0, kv, [])
    assert there(PoolHitPolicy.ALL_PAGES) == (0, kv, [])
    assert there(PoolHitPolicy.BLOCK_GROUPS) == (6, kv, list(range(1, 7)))
    nothing = one.storage.batch_exists_v2(keys_of([9]), [swa])
    assert (nothing.kv_hit_pages, nothing.extra_pool_hit_pages) == (0, {})


def test_all_pages_of_a_pool_up_to_the_first_that_lacks(make: Callable[..., Made]) -> None:
    one, index = make(), sg.host_pool(COPIED)
    one.storage.register_mem_host_pool_v2(index, PoolName.INDEXER)
    one.put(range(6))
    at = index.alloc(4 * sg.PAGE)
    sg.fill(index, at, range(4))
    moved = PoolTransfer(name=PoolName.INDEXER, host_indices=at, keys=keys_of(range(4)))
    one.storage.batch_set_v2([moved])
    found = one.storage.batch_exists_v2(keys_of(range(6)), [PoolTransfer(name=PoolName.INDEXER)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.INDEXER: 4}


def test_indices_that_do_not_fit_their_keys(make: Callable[..., Made]) -> None:
    one = make()
    bad = PoolTransfer(name=PoolName.KV, host_indices=torch.arange(5), keys=keys_of([1]))
    assert one.storage.batch_set_v2([bad]) == {PoolName.KV: [False]}
    assert one.storage.batch_get_v2([bad]) == {PoolName.KV: [False]}
    with pytest.raises(ConfigError, match="mamba"):
        one.storage.batch_get_v2([PoolTransfer(name=PoolName.MAMBA, keys=[])])
