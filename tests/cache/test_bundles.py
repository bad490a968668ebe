"""Named tensors beside the pages: whole, in part, after a restart, damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from flowkv import KV
from flowkv.testing import MemoryTier
from flowkv.tiers import Load, Store
from flowkv.tiers.shared import SharedTier
from tests.cache.audit import audit
from tests.cache.fakes import Deferred, Silent, Wrapped, lasting
from tests.cache.toy import check_content, make_kv, opened, published, simple
from tests.inside import StoreError, export

KIB = 1 << 10
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64)


class Watched(Wrapped):
    """Notes what is asked for."""

    def __init__(self, inner: Any, **changes: Any) -> None:
        super().__init__(inner, **changes)
        self.loads: list[Load] = []

    def submit_load(self, items: Any, *, deadline_s: float = 10.0) -> int:
        self.loads += items
        return int(self.inner.submit_load(items, deadline_s=deadline_s))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Nine MiB and some: two parts, one of them with an odd end."""
    torch.manual_seed(seed)
    return {
        "embed": torch.randn(700, 1000),
        "none": torch.zeros(0, 4),
        "up": torch.randn(900, 999).to(torch.bfloat16).t(),
        "flag": torch.tensor(True),
        "down": torch.randn(1300, 999),
    }


def equal(a: dict[str, torch.Tensor] | None, b: dict[str, torch.Tensor]) -> bool:
    if a is None or a.keys() != b.keys():
        return False
    same = (
        x.dtype == y.dtype and torch.equal(x, y)
        for x, y in zip(a.values(), b.values(), strict=True)
    )
    return all(same)


def kv_over(*tiers: Any, **options: Any) -> KV:
    return make_kv(simple(), pages=8, tiers=tiers, **options)


def test_tensors_come_back_bit_for_bit() -> None:
    kv, given = kv_over(lasting()), weights()
    assert kv.keep("model", given) and kv.flush(60)
    assert equal(kv.fetch("model"), given)
    assert kv.fetch("other") is None and kv.fetch("model", tenant="bob") is None
    published(kv, [1] * 24)
    assert kv.explain([1] * 25).known == 24


def test_they_are_there_before_they_are_written() -> None:
    disk = Deferred(lasting())
    kv, given = kv_over(disk), weights()
    assert kv.keep("model", given)
    disk.poll = lambda timeout_s=0.0: []
    assert not disk.frames and equal(kv.fetch("model"), given)
    del disk.poll
    assert kv.flush(60) and equal(kv.fetch("model"), given)


def test_only_the_stripes_of_a_tensor_are_read() -> None:
    disk = Watched(lasting())
    kv, given = kv_over(disk), weights()
    kv.keep("model", given)
    kv.flush(60)
    disk.loads.clear()
    found = kv.fetch("model", ["up", "flag"])
    assert found is not None and equal(found, {name: given[name] for name in ("up", "flag")})
    table, *parts = disk.loads
    assert (table.first, table.stripes) == (0, 1)
    read = sum(load.target.nbytes for load in parts)
    assert read <= given["up"].numel() * 2 + 2 * export.STRIPE_BYTES + 4096 < 3 << 20
    assert all(load.target.nbytes == load.stripes * export.STRIPE_BYTES for load in parts)
    with pytest.raises(StoreError, match=r"'model' has no tensor 'gate'\. It has embed, none"):
        kv.fetch("model", ["gate"])


def test_many_names_make_a_long_table() -> None:
    kv = kv_over(lasting())
    given = {f"layer.{i}.weight": torch.full((3,), float(i)) for i in range(300)}
    kv.keep("model", given)
    assert kv.flush(60) and equal(kv.fetch("model"), given)


def test_kept_again_under_one_name_replaces() -> None:
    memory = MemoryTier()
    kv = kv_over(memory)
    for seed in (1, 2):
        assert kv.keep("model", weights(seed)) and kv.flush(60)
        assert equal(kv.fetch("model"), weights(seed)) and len(memory.frames) == 3
    assert kv.keep("model", {}) and kv.flush(60)
    assert kv.fetch("model") == {} and len(memory.frames) == 1


@pytest.mark.parametrize("options", [{}, {"integrity": "aead", "secret": "ab" * 32}], ids=str)
def test_a_restart_finds_them_on_the_disk(tmp_path: Path, options: dict[str, Any]) -> None:
    if options:
        pytest.importorskip("cryptography")
    place, given = f"disk:{tmp_path / 'kv'}:64MiB", weights()
    with kv_over(place, **options) as kv:
        assert kv.keep("model", given)
        published(kv, [1] * 24)
    with kv_over(place, **options) as kv:
        assert equal(kv.fetch("model"), given)
        (name,) = kv.stats()["tiers"]
        assert kv.stats()["tiers"][name]["loaded_bytes"] >= 9 << 20
        with kv.open([1] * 25) as seq:
            check_content(kv, seq, [1] * 24)
        assert kv.forget(tenant="") == 6 and kv.fetch("model") is None
        audit(kv)
    with kv_over(place, **options) as kv:
        assert kv.fetch("model") is None and kv.stats()["blocks"] == 0


def test_damage_is_a_miss(tmp_path: Path) -> None:
    place, given = f"disk:{tmp_path / 'kv'}:64MiB", weights()
    with kv_over(place, lossless="off") as kv:
        kv.keep("model", given)
    piece = given["down"].numpy().tobytes()[100_000:100_064]
    for file in (tmp_path / "kv").rglob("*"):
        if file.is_file():
            data = bytearray(file.read_bytes())
            if (at := data.find(piece)) >= 0:
                data[at] ^= 1
                file.write_bytes(data)
                break
    else:
        pytest.fail("the bytes lie nowhere")
    with kv_over(place) as kv:
        assert equal(kv.fetch("model", ["embed"]), {"embed": given["embed"]}), "another stripe"
        assert kv.fetch("model") is None and kv.fetch("model", ["down"]) is None
        assert kv.keep("model", given) and equal(kv.fetch("model"), given)


def test_memory_that_a_late_tier_may_write_to_is_given_to_nobody() -> None:
    class Late(Silent):
        def submit_load(self, items: Any, *, deadline_s: float = 10.0) -> int:
            self.silent = items[0].target.nbytes > 4096  # the table comes
            return super().submit_load(items, deadline_s=deadline_s)

    near, far, given = Late(lasting(name="near")), lasting(name="far"), weights()
    kv = kv_over(near, far, load_deadline_s=0.05)
    assert kv.keep("model", given) and kv.flush(60)
    for frame in [Store(e.key, e.info, memoryview(near.frames[e.key][1])) for e in near.scan()]:
        far.submit_store([frame])
    assert len(far.poll()) == 3
    with kv.lock:
        kv.planner.store.stack.listing.list_unknown(1, lambda _: True)
    found = kv.fetch("model")
    near.scribble()
    assert found is None or equal(found, given)
    assert near.loads == 2 and equal(kv.fetch("model"), given), "the other tier has it"
    near.speak()


def test_another_process_finds_them_on_a_shared_tier(tmp_path: Path) -> None:
    kv, other = (
        kv_over(Wrapped(SharedTier("bundle", 32 << 20, directory=tmp_path), kind="disk"))
        for _ in range(2)
    )
    assert kv.keep("model", weights()) and kv.flush(60)
    assert equal(other.fetch("model"), weights())


def test_what_another_process_kept_is_evicted_and_not_exported(tmp_path: Path) -> None:
    """Its length is unknown to a cache that was open before."""
    here, there = (kv_over(SharedTier("kv", 32 << 20, directory=tmp_path)) for _ in range(2))
    there.keep("adapter", weights())
    assert equal(here.fetch("adapter"), weights())
    for kv in (here, there):
        said = kv.export(tmp_path / "pages")
        assert (said.frames, said.missing) == (0, 0)
    with here.lock:
        stack = here.planner.store.stack
        for block in list(here.planner.store.index):
            stack.take_back(block, 0)
    assert not len(here.planner.store.index)


def test_where_no_room_is_they_are_not_kept() -> None:
    kv = kv_over(MemoryTier(1 << 20))
    assert not kv.keep("model", weights()) and kv.fetch("model") is None
    assert not make_kv(simple()).keep("model", {})
    with pytest.raises(StoreError, match="tensor 'c' has dtype complex64"):
        kv.keep("model", {"c": torch.zeros(3, dtype=torch.complex64)})


def test_they_demote_like_pages() -> None:
    near, far = MemoryTier(10 << 20, name="near"), MemoryTier(name="far")
    kv = kv_over(near, far)
    kv.keep("a", weights(1))
    kv.flush(60)
    kv.keep("b", weights(2))
    kv.flush(60)
    assert far.frames and equal(kv.fetch("a"), weights(1)) and equal(kv.fetch("b"), weights(2))


def test_weights_are_no_prompt() -> None:
    kv = kv_over(lasting())
    kv.keep("model", {"w": torch.ones(9)})
    kv.flush(60)
    seq = opened(kv, [1] * 24)
    assert kv.forget([1] * 24) == 3 and kv.forget([]) == 0
    seq.close()
    assert kv.fetch("model") is not None


TENSORS = st.dictionaries(
    st.text(max_size=5),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3)),
    max_size=6,
)


@settings(max_examples=15)
@given(TENSORS, st.data())
def test_any_tensors_come_back(shapes: dict[str, Any], data: st.DataObject) -> None:
    before = export.STRIPE_BYTES, export.PART_BYTES
    export.STRIPE_BYTES, export.PART_BYTES = 8 * KIB, 32 * KIB
    try:
        kv = kv_over(lasting())
        given = {
            name: (torch.rand(shape) * 100).to(dtype) for name, (dtype, shape) in shapes.items()
        }
        assert kv.keep("it", given) and kv.flush(60) and equal(kv.fetch("it"), given)
        some = data.draw(st.lists(st.sampled_from(sorted(given)), unique=True)) if given else []
        assert equal(kv.fetch("it", some), {name: given[name] for name in some})
    finally:
        export.STRIPE_BYTES, export.PART_BYTES = before
