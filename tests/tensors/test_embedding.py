"""Embeddings on disk: the same bits as in memory, or an error."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowkv
from tests import interrupts
from tests.clock import in_child, together
from tests.fixture_model import load_tiny
from tests.inside import (
    LEAST_KNOWN,
    ROW_KNOWN_BYTES,
    Bus,
    ConfigError,
    EmbeddingTable,
    RowsRead,
    StateError,
    StoreError,
    embedding,
    write_table,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def made(rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.nn.Embedding:
    module = torch.nn.Embedding(rows, width, dtype=torch.float32)
    return module.to(dtype).eval()


def host(rows: int, width: int, dtype: torch.dtype = torch.float32) -> int:
    """Memory for so many rows, some hundreds at most."""
    size = width * dtype.itemsize
    held = LEAST_KNOWN * ROW_KNOWN_BYTES + rows * size + max(4096, 2 * size)
    return 8 * (held + (1 << 13)) // 7


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 600),
    width=st.sampled_from([1, 3, 64, 100, 1023, 2049]),
    dtype=st.sampled_from(DTYPES),
    pool=st.integers(1, 700),
    policy=st.sampled_from(["lfu-ttl", "lru", "arc"]),
)
def test_rows_are_those_of_the_table(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    rows: int,
    width: int,
    dtype: torch.dtype,
    pool: int,
    policy: str,
) -> None:
    torch.manual_seed(seed)
    module, disk = made(rows, width, dtype), tmp_path_factory.mktemp("table")
    weight, budget = module.weight.clone(), host(pool, width, dtype)
    attached = flowkv.attach_embedding(module, disk=disk, host=budget, policy=policy)
    for shape in [(3, 5), (1,), (0,), (2, 0), (rows,), (2, 3, 7), (), (64,), (700,)]:
        ids = (torch.rand(shape) ** 3 * rows).long()
        got = module(ids)
        assert got.dtype == dtype
        assert torch.equal(got, weight[ids])
    stats = attached.stats()
    assert 0 < stats["resident_rows"] <= stats["pool_rows"] <= rows
    assert stats["pool_rows"] >= min(pool, rows)
    attached.detach()
    assert torch.equal(module.weight, weight)
    assert torch.equal(module(torch.arange(rows)), weight)


def test_hot_rows_stay_and_are_not_read_again(tmp_path: Path) -> None:
    module, ids, told = made(1000, 64), torch.arange(20), []
    bus = Bus()
    bus.subscribe(told.append, RowsRead)
    with flowkv.attach_embedding(module, disk=tmp_path / "t", host=host(30, 64), bus=bus) as held:
        for _ in range(3):
            module(ids)
        assert [(one.rows, one.found) for one in told] == [(20, 0), (20, 20), (20, 20)]
        assert held.stats()["read_bytes"] == told[0].n_bytes == 2 * 4096
        for n in range(20, 1000, 10):  # what comes once does not push them out for long
            module(torch.cat((ids, torch.arange(n, n + 2))))
        stats = held.stats()
        assert stats["hits"] >= 0.85 * 20 * 98


def test_interrupts_anywhere_leave_no_row_under_the_number_of_another(tmp_path: Path) -> None:
    module, draws = made(900, 64), torch.Generator().manual_seed(3)
    weight, only = module.weight.clone(), {"only": ("tensors/embedding",)}

    def look() -> None:
        ids = torch.randint(900, (30,), generator=draws)
        assert torch.equal(module(ids), weight[ids])

    budget = host(40, 64)
    with flowkv.attach_embedding(module, disk=tmp_path / "t", host=budget, policy="lru") as held:
        for _ in range(5):
            look()
        with interrupts.collectable():
            for at in range(1, interrupts.places(look, **only) + 1):
                interrupts.run(look, interrupts.Tracer(at, **only))
                for _ in range(3):
                    look()
        whole = held.table
        assert int((whole._at >= 0).sum()) + whole._free_rows == whole.pool_rows
        assert torch.equal(whole.all_rows(), weight)


def test_an_interrupt_behind_the_last_step_leaves_the_new_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, [torch.zeros(3, 4)])
    real = Path.replace

    def replace(path: Path, target: Path) -> None:
        real(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write_table(tmp_path, [torch.ones(3, 4)])
    with EmbeddingTable(tmp_path) as table:
        assert (table.all_rows() == 1).all()


def test_the_table_serves_another_process_without_its_weights(tmp_path: Path) -> None:
    module = made(500, 32)
    weight, ids = module.weight.clone(), torch.tensor([[3, 499], [0, 3]])
    flowkv.attach_embedding(module, disk=tmp_path / "t").close()
    with pytest.raises(StateError):
        module(ids)
    empty = torch.nn.Embedding(500, 32, device="meta").eval()
    attached = flowkv.attach_embedding(empty, disk=tmp_path / "t")
    assert torch.equal(empty(ids), weight[ids])
    attached.detach()
    assert torch.equal(empty.weight, weight)
    again = made(500, 32)
    with pytest.raises(ConfigError, match="other weights"):
        flowkv.attach_embedding(again, disk=tmp_path / "t")
    assert again.weight.device.type == "cpu"
    again.weight.copy_(weight)
    with flowkv.attach_embedding(again, disk=tmp_path / "t"):
        assert torch.equal(again(ids), weight[ids])


def test_a_table_larger_than_memory_is_written_in_parts(tmp_path: Path) -> None:
    parts = [torch.randn(n, 24) for n in (1, 700, 43, 42, 0, 5)]
    write_table(tmp_path / "t", (part for part in parts))
    with EmbeddingTable(tmp_path / "t") as table:
        assert torch.equal(table.all_rows(), torch.cat(parts))
        raw = table.look_up(np.array([790, 0, 744]))
        want = torch.cat(parts)[[790, 0, 744]]
        assert torch.equal(torch.from_numpy(raw).view(torch.float32), want)


@pytest.mark.parametrize("parts", [[], [torch.zeros(0, 4)], [torch.zeros(3)]])
def test_what_is_no_table_is_not_written(tmp_path: Path, parts: list[torch.Tensor]) -> None:
    with pytest.raises((ConfigError, StoreError)):
        write_table(tmp_path / "t", parts)
    assert list((tmp_path / "t").iterdir()) == []


def test_parts_of_different_widths_leave_the_old_table(tmp_path: Path) -> None:
    write_table(tmp_path / "t", [torch.ones(10, 4)])
    with pytest.raises(ConfigError, match="part of shape"):
        write_table(tmp_path / "t", [torch.zeros(10, 4), torch.zeros(10, 5)])
    assert len(list((tmp_path / "t").iterdir())) == 2
    with EmbeddingTable(tmp_path / "t") as table:
        assert (table.all_rows() == 1).all()


@pytest.mark.parametrize("seed", range(24))
def test_damage_is_an_error_and_never_a_row(tmp_path: Path, seed: int) -> None:
    draw = np.random.default_rng(seed)
    weight = torch.randn(800, 100)
    write_table(tmp_path / "t", [weight])
    files = sorted((tmp_path / "t").iterdir())
    path = files[seed % 2]
    data = bytearray(path.read_bytes())
    at, kind = int(draw.integers(len(data))), seed // 2 % 4
    if kind == 0:
        data[at] ^= 1 << int(draw.integers(8))
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data += b"\0" * 4096
    else:
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    path.write_bytes(data)
    errors, ids = 0, np.arange(800)
    try:
        with EmbeddingTable(tmp_path / "t", host=host(64, 100)) as table:
            for _ in range(2):
                for some in np.array_split(ids, 40):
                    try:
                        raw = table.look_up(some)
                    except StoreError as error:
                        errors += "Delete the directory" in str(error)
                        continue
                    want = weight[torch.from_numpy(some)]
                    assert torch.equal(torch.from_numpy(raw).view(torch.float32), want)
    except StoreError as error:
        errors += "Delete the directory" in str(error)
    assert errors or kind == 3


def test_two_writers_at_once_leave_a_table(tmp_path: Path) -> None:
    """As processes that start together: one begins first and ends last."""
    first, other = torch.ones(600, 64), torch.zeros(600, 64)

    def parts() -> Iterator[torch.Tensor]:
        yield first
        (path,) = tmp_path.glob("table-*")
        os.utime(path, (0, 0))
        write_table(tmp_path, [other])
        yield first

    write_table(tmp_path, parts())
    table = EmbeddingTable(tmp_path, host="1MiB")
    assert torch.equal(table.all_rows(), torch.cat([first, first]))
    table.close()


def test_a_table_that_is_about_to_be_opened_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path, [torch.ones(10, 64)])
    read = embedding._read_manifest

    def slow(folder: Path) -> Any:
        said = read(folder)
        monkeypatch.undo()
        write_table(tmp_path, [torch.zeros(10, 64)])
        return said

    monkeypatch.setattr(embedding, "_read_manifest", slow)
    table = EmbeddingTable(tmp_path, host="1MiB")
    assert torch.equal(table.all_rows(), torch.ones(10, 64))
    table.close()


def test_a_table_that_is_changed_under_it_is_noticed(tmp_path: Path) -> None:
    write_table(tmp_path / "t", [torch.ones(800, 100)])
    (path,) = (tmp_path / "t").glob("table-*")
    with EmbeddingTable(tmp_path / "t", host=host(8, 100)) as table:
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(StoreError, match="is not what was written"):
            table.look_up(np.arange(4))
        path.write_bytes(b"")
        with pytest.raises(StoreError, match="cannot be read"):
            table.look_up(np.arange(4))


def test_a_cache_on_top_never_takes_one_table_for_another(tmp_path: Path) -> None:
    prompt = torch.arange(10, 80)[None]
    for n, scale in enumerate((1, 3)):
        names = list[bytes]()
        for seen in (0, 64):  # a table is known again, also by a model that never held it
            model = load_tiny()
            embedding = model.get_input_embeddings()
            embedding.weight.mul_(scale)
            plain = model.generate(prompt, max_new_tokens=6, do_sample=False)
            if seen:
                embedding.to("meta")
            held = flowkv.attach_embedding(embedding, disk=tmp_path / str(n), host="2MiB")
            with held, flowkv.attach(model, disk=f"{tmp_path}/kv:64MiB") as kv:
                assert kv.explain(prompt[0].tolist()).known == seen
                names.append(kv.namespace)
                for _ in range(2):
                    found = model.generate(prompt, max_new_tokens=6, do_sample=False)
                    assert torch.equal(found, plain)
        assert names[0] == names[1]


def test_a_model_knows_where_it_is_and_nothing_reads_what_is_not_there(tmp_path: Path) -> None:
    model = load_tiny()
    plain = model.generate(torch.tensor([[7, 9]]), max_new_tokens=4, do_sample=False)
    embedding = model.get_input_embeddings()
    shape = embedding.weight.shape
    with flowkv.attach_embedding(embedding, disk=tmp_path / "t"):
        assert (model.device.type, model.dtype) == ("cpu", torch.float32)
        assert embedding.weight.shape == shape
        model.to("cpu").float()
        ids = torch.tensor([[7, 9]]).to(model.device)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)
        for use in (
            *(lambda: embedding.weight + 1, lambda: embedding.weight[3]),
            lambda: copy.deepcopy(embedding),
            lambda: torch.nn.functional.linear(torch.ones(1, shape[1]), embedding.weight),
            *(embedding.weight.data.clone, embedding.weight.zero_, embedding.half),
        ):
            with pytest.raises(StateError, match="lie on disk"):
                use()
        assert "on disk" in repr(embedding.weight)


@pytest.mark.parametrize("way", ["replaced", "assigned", "data"])
def test_another_weight_is_not_passed_over(tmp_path: Path, way: str) -> None:
    """Rows of the table are not served under the name of a weight that the module was given."""
    module, other = made(100, 16), made(100, 16)
    attached = flowkv.attach_embedding(module, disk=tmp_path / "t")
    if way == "replaced":
        module.weight = other.weight
    elif way == "assigned":
        module.load_state_dict(other.state_dict(), assign=True)
    else:
        module.weight.data = other.weight.data
    with pytest.raises(StateError, match="another weight"):
        module(torch.tensor([3]))
    rows, ids = module.weight, torch.arange(100)
    attached.detach()
    assert (module.weight is rows) == (way != "data")
    assert torch.equal(module(ids), other(ids)) == (way != "data")


def test_detach_restores_what_others_still_hold(tmp_path: Path) -> None:
    embedding, head = torch.nn.Embedding(50, 8).eval(), torch.nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    first = embedding.weight
    flowkv.attach_embedding(embedding, disk=tmp_path, host="1MiB").detach()
    assert embedding.weight is head.weight is first
    rows, attached = first.clone(), flowkv.attach_embedding(embedding, disk=tmp_path, host="1MiB")
    first.data = torch.empty(0)  # to free memory
    attached.detach()
    assert torch.equal(embedding.weight, rows)


def test_what_needs_the_memory_of_a_table_is_refused_in_words(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(50, 8).eval().requires_grad_(False)
    with flowkv.attach_embedding(embedding, disk=tmp_path, host="1MiB"):
        with pytest.raises(StateError, match="shared"):
            embedding.share_memory()  # which ended the process
        with pytest.raises(StateError, match="compiled"):
            torch.compile(embedding, backend="eager")(torch.tensor([1]))


def test_a_table_is_not_saved_as_nothing(tmp_path: Path) -> None:
    module = made(100, 16)
    attached = flowkv.attach_embedding(module, disk=tmp_path / "t")
    with attached, pytest.raises(StateError, match="cannot be saved"):
        torch.save(module.state_dict(), tmp_path / "saved.pt")


def test_a_closed_table_says_so(tmp_path: Path) -> None:
    module = made(100, 16)
    attached = flowkv.attach_embedding(module, disk=tmp_path / "t")
    attached.close()
    for use in (attached.detach, lambda: module(torch.tensor([3]))):
        with pytest.raises(StateError, match="closed"):
            use()


def test_a_forked_child_never_waits_for_the_parents_lock(tmp_path: Path) -> None:
    module = made(100, 16)
    attached = flowkv.attach_embedding(module, disk=tmp_path / "t")
    wanted = module(torch.tensor([3]))
    with attached.table._lock:

        def refused() -> int:
            for use in (attached.detach, lambda: module(torch.tensor([3]))):
                with pytest.raises(StateError):
                    use()
            lookups = attached.stats()["lookups"]
            attached.close()
            return 1 - lookups

        assert in_child(refused) == 0
    assert torch.equal(module(torch.tensor([3])), wanted)
    attached.close()


def test_what_would_write_to_rows_is_refused(tmp_path: Path) -> None:
    for options in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(ConfigError, match="writes to its rows"):
            flowkv.attach_embedding(torch.nn.Embedding(4, 4, **options), disk=tmp_path / "t")
    with pytest.raises(ConfigError, match=r"no torch\.nn\.Embedding"):
        flowkv.attach_embedding(torch.nn.Linear(4, 4), disk=tmp_path / "t")
    module = torch.nn.Embedding(4, 4)
    ids = torch.tensor([1])
    with flowkv.attach_embedding(module, disk=tmp_path / "t"), torch.enable_grad():
        with pytest.raises(StateError, match="cannot be trained"):
            module(ids)
        module.eval()
        assert not module(ids).requires_grad


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no table"):
        flowkv.attach_embedding(torch.nn.Embedding(4, 4, device="meta"), disk=tmp_path / "none")
    module = made(100, 16)
    with flowkv.attach_embedding(module, disk=tmp_path / "t", host="1MiB"):
        for ids in ([100], [-1], [0, 1 << 40]):
            with pytest.raises(IndexError, match="out of range"):
                module(torch.tensor(ids))
        with pytest.raises(ConfigError, match="attached already"):
            flowkv.attach_embedding(module, disk=tmp_path / "t")
    with pytest.raises(ConfigError, match="holds no row"):
        flowkv.attach_embedding(made(100, 16), disk=tmp_path / "u", host=100)
    for other in (made(101, 16), made(100, 17), made(100, 16, torch.float16)):
        with pytest.raises(ConfigError, match="Name another directory"):
            flowkv.attach_embedding(other, disk=tmp_path / "t")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        flowkv.attach_embedding(made(100, 16), disk=tmp_path / "file")


def test_a_forward_of_its_own_is_not_lost(tmp_path: Path) -> None:
    class Scaled(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 4

    with pytest.raises(ConfigError, match="forward of its own"):
        flowkv.attach_embedding(Scaled(4, 4), disk=tmp_path / "t")
    module = made(100, 16)
    with flowkv.attach_embedding(module, disk=tmp_path / "t"):
        for ids in (torch.tensor([1.7]), torch.tensor([True])):
            with pytest.raises(TypeError, match="int32 or int64"):
                module(ids)
        with pytest.raises(StateError, match="lie on disk"):
            module.half()


def test_threads_get_their_own_rows(tmp_path: Path) -> None:
    module, wrong = made(3000, 16), []
    weight = module.weight.clone()
    attached = flowkv.attach_embedding(module, disk=tmp_path / "t", host=host(200, 16))

    def ask(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(60):
            ids = torch.from_numpy((draw.random(50) ** 4 * 3000).astype(np.int64))
            wrong.extend([] if torch.equal(module(ids), weight[ids]) else [seed])

    together(*(partial(ask, n) for n in range(4)))
    assert not wrong
    assert attached.stats()["lookups"] == 240
    attached.close()
    attached.close()


def _write_slowly(folder: str, ready: object) -> None:
    def parts() -> Iterator[torch.Tensor]:
        yield torch.zeros(5000, 64)
        ready.set()  # type: ignore[attr-defined]
        signal.pause()

    write_table(folder, parts())


def test_a_process_that_is_killed_leaves_the_old_table(tmp_path: Path) -> None:
    write_table(tmp_path / "t", [torch.ones(10, 64)])
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_write_slowly, args=(str(tmp_path / "t"), ready))
    process.start()
    assert ready.wait(60)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with EmbeddingTable(tmp_path / "t") as table:
        assert (table.all_rows() == 1).all()
    for left in (tmp_path / "t").glob("table-*"):
        os.utime(left, (0, 0))  # new ones may be in use
    write_table(tmp_path / "t", [torch.zeros(10, 64)])
    assert len(list((tmp_path / "t").iterdir())) == 2
    with EmbeddingTable(tmp_path / "t") as table:
        assert (table.all_rows() == 0).all()
