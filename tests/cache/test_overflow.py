"""Sequences longer than their device: attended as if all pages lay on it, in bounded memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from flowkv import KV, Geometry, LayerGroup, Sequence
from flowkv.testing import MemoryTier
from tests.cache.fakes import Halting, Silent, lasting
from tests.cache.test_pinned import FakeMark, behind_a_bus
from tests.inside import (
    CapacityError,
    ConfigError,
    Copies,
    StateError,
    StoreError,
    overflow,
    page_layout,
)

LAYERS, HEADS, DIM, TOLERANCE = 3, 2, 64, 2e-5


def geometry(kind: str = "full", page_size: int = 16) -> Geometry:
    """Full layers, beside a sliding one if asked for; or latent ones."""
    if kind == "latent":
        latent = LayerGroup(layers=(0, 1), kv_heads=1, head_dim=DIM, value_dim=32, kind="latent")
        return Geometry(groups=(latent,), page_size=page_size)
    full = Geometry.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, page_size=page_size)
    if kind == "full":
        return full
    sliding = LayerGroup(
        layers=(LAYERS,), kv_heads=1, head_dim=DIM, value_dim=DIM, kind="sliding", window=20
    )
    return Geometry(groups=(*full.groups, sliding), page_size=page_size)


def make(shape: Geometry, pages: int, **options: Any) -> KV:
    granules = sum(page_layout(group, shape.page_size).granules for group in shape.groups)
    given = {"gpu": pages * granules * 4096, "host": "64MiB", "namespace": "m"} | options
    return KV(shape, **given)


class Noise:
    """A row of a model whose keys, values and queries are noise, and all of them so far.

    Rows of one seed get the same noise for the same positions: those of one prompt.
    """

    def __init__(self, shape: Geometry, seed: int = 0) -> None:
        self.shape, self.seed = shape, seed
        self.kept: dict[int, list[torch.Tensor]] = {}

    def copy(self) -> Noise:
        twin = Noise(self.shape, self.seed)
        twin.kept = {layer: list(parts) for layer, parts in self.kept.items()}
        return twin

    def cut(self, length: int) -> Noise:
        """The same row, with no more than so many tokens."""
        self.kept = {layer: [torch.cat(parts)[:length]] for layer, parts in self.kept.items()}
        return self

    def make(self, layer: int, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """K, V and queries of new tokens, which are remembered."""
        group = self.shape.groups[self.shape.locate(layer)[0]]
        heads, parts = group.kv_heads, []
        for position in range(first, first + count):
            torch.manual_seed(hash((self.seed, layer, position)) & 0xFFFF_FFFF)
            parts.append(torch.randn(4 * heads, DIM))
        k, v, q = torch.stack(parts).split([heads, heads, 2 * heads], 1)
        v = k[..., : group.value_dim] if group.kind == "latent" else v
        known = self.kept.setdefault(layer, [])
        if first < sum(len(part) for part in known):  # attached, and now computed once more
            known[:] = [torch.cat(known)[:first]]
        known.append(torch.cat([k, v], 2))
        return k, v, q

    def attention(self, layer: int, q: torch.Tensor, **how: Any) -> torch.Tensor:
        """`[T, Hq, Dv]`, over everything, in double precision."""
        group = self.shape.groups[self.shape.locate(layer)[0]]
        both = torch.cat(self.kept[layer]).double().repeat_interleave(2, 1)
        keys, values = both[..., :DIM], both[..., DIM:]
        new, length = len(q), len(keys)
        scores = torch.einsum("thd,shd->hts", q.double(), keys) * DIM**-0.5
        if "softcap" in how:
            scores = how["softcap"] * torch.tanh(scores / how["softcap"])
        at, seen = torch.arange(length - new, length)[:, None], torch.arange(length)
        hidden = (seen > at) | (at - seen >= (group.window or length + 1))
        scores = scores.masked_fill(hidden, -torch.inf)
        if "sinks" in how:
            sinks = how["sinks"][: q.shape[1]].double()[:, None, None].expand(-1, new, 1)
            scores = torch.cat([scores, sinks], 2)
            values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        return torch.einsum("hts,shd->thd", scores.softmax(-1), values).float()


def run(
    kv: KV, seqs: list[Sequence], rows: list[list[int]], models: list[Noise], **how: Any
) -> Any:
    """One step over rows of new tokens.

    Returns:
        The outputs of all layers, and their greatest distance from what they should be.
    """
    worst, outputs = 0.0, []
    with kv.step(seqs, rows) as step:
        for group in models[0].shape.groups:
            for layer in group.layers:
                each = zip(models, seqs, rows, strict=True)
                parts = [one.make(layer, seq.length, len(row)) for one, seq, row in each]
                k, v, q = (torch.cat([part[i] for part in parts]) for i in range(3))
                given = how | ({"sinks": how["sinks"][: q.shape[1]]} if "sinks" in how else {})
                value = None if group.kind == "latent" else v
                outputs.append(step.attend(layer, q, k, value, **given))
                wanted = [
                    one.attention(layer, part[2], **how)
                    for one, part in zip(models, parts, strict=True)
                ]
                worst = max(worst, float((outputs[-1] - torch.cat(wanted)).abs().max()))
    return outputs, worst


@pytest.fixture(autouse=True)
def small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few stripes, so that a scan takes many."""
    monkeypatch.setattr(overflow, "LEAST_BYTES", 1 << 15)
    monkeypatch.setattr(overflow, "MOST_BYTES", 1 << 15)


def compute(kv: KV, seq: Sequence, prompt: list[int], model: Noise) -> None:
    """The rest of a prompt, a few tokens at a time."""
    for first in range(seq.length, len(prompt), 32):
        run(kv, [seq], [prompt[first : first + 32]], [model])


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


@contextmanager
def opened(kv: KV, count: int = 1) -> Iterator[list[Sequence]]:
    seqs = [kv.open([], reuse=False) for _ in range(count)]
    try:
        yield seqs
    finally:
        for seq in seqs:
            seq.close()


@contextmanager
def small_pool(
    pages: int = 8, count: int = 1, shape: Geometry | None = None, **options: Any
) -> Iterator[tuple[Any, ...]]:
    """A cache of a pool of few pages, rows without tokens, and as many models."""
    shape = shape or geometry()
    with make(shape, pages, overflow=True, **options) as kv, opened(kv, count) as seqs:
        yield kv, *seqs, *(Noise(shape, row) for row in range(count))


def grow(kv: KV, seqs: list[Sequence], models: list[Noise], count: int, chunk: int = 32) -> float:
    """So many tokens more for each row; the greatest distance from what attention should be."""
    worst = 0.0
    for first in range(0, count, chunk):
        rows = [
            tokens(min(chunk, count - first), 1000 + seq.row * 999 + seq.length) for seq in seqs
        ]
        worst = max(worst, run(kv, seqs, rows, models)[1])
    return worst


class TestAttention:
    @pytest.mark.parametrize("kind", ["full", "sliding", "latent"])
    @pytest.mark.parametrize(
        "how", [{}, {"softcap": 5.0}, {"sinks": torch.tensor([1.0, -2, 3, 0])}]
    )
    def test_is_that_over_everything(self, kind: str, how: dict[str, Any]) -> None:
        with small_pool(shape=geometry(kind)) as (kv, seq, model):
            for turn in range(10):
                assert run(kv, [seq], [tokens(32, turn)], [model], **how)[1] < TOLERANCE
            for turn in range(18):
                assert run(kv, [seq], [tokens(1, turn)], [model], **how)[1] < TOLERANCE
            assert seq.length == 338 and seq.away > 12

    def test_of_rows_of_different_lengths(self) -> None:
        with small_pool(16, 3) as (kv, *both):
            seqs, models = both[:3], both[3:]
            assert grow(kv, seqs[1:2], models[1:2], 375) < TOLERANCE
            assert grow(kv, seqs, models, 175) < TOLERANCE
            assert grow(kv, seqs, models, 18, chunk=1) < TOLERANCE
            assert grow(kv, seqs[:1], models[:1], 75) < TOLERANCE
            assert all(seq.away for seq in seqs)

    def test_of_forks(self) -> None:
        with small_pool(16) as (kv, seq, model):
            assert grow(kv, [seq], [model], 400) < TOLERANCE
            twin, other = kv.fork(seq), model.copy()
            assert twin.away == seq.away > 0
            assert grow(kv, [seq, twin], [model, other], 100) < TOLERANCE
            twin.close()
            assert grow(kv, [seq], [model], 40) < TOLERANCE

    @pytest.mark.parametrize("codec", ["kv8", "kv4c", "auto"])
    def test_of_encoded_pages_is_that_of_the_same_pages_on_the_device(self, codec: str) -> None:
        shape, found, distances = geometry(page_size=64), [], []
        options = dict(codec=codec, recent_tokens=64, defragment_bytes=0, overflow=True)
        for pages in (4, 64):
            with make(shape, pages, **options) as kv, opened(kv) as (seq,):
                model = Noise(shape)
                made = [run(kv, [seq], [tokens(64, turn)], [model]) for turn in range(14)]
                made += [run(kv, [seq], [tokens(1, turn)], [model]) for turn in range(5)]
                assert (seq.away > 0) == (pages == 4)
                found.append([layer for outputs, _ in made for layer in outputs])
                distances.append(max(worst for _, worst in made))
        if codec == "auto":  # what left is encoded no further
            assert distances[0] <= 1.01 * distances[1]
        else:
            assert all(torch.allclose(a, b, atol=TOLERANCE) for a, b in zip(*found, strict=True))

    def test_over_lossy_pages_is_no_more_exact_than_they_are(self) -> None:
        options = dict(codec="kv8", recent_tokens=64, defragment_bytes=0)
        with small_pool(4, shape=geometry(page_size=64), **options) as (kv, seq, model):
            grow(kv, [seq], [model], 1920, chunk=64)
            assert seq.away > 0
            seq.fidelity = 0  # as of pages of which nobody here knows what they were built on
            run(kv, [seq], [[1]], [model])
            assert seq.fidelity > 0


class TestWhatFits:
    def test_is_served_as_without_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not one call of what is only there for longer contexts, nor a stage."""
        called = list[Any]()
        monkeypatch.setattr(overflow.Scan, "__init__", lambda *given: called.append(given))
        monkeypatch.setattr(overflow.Overflow, "_leave", lambda *given: called.append(given))
        with small_pool(64) as (kv, seq, model):
            assert grow(kv, [seq], [model], 600) < TOLERANCE
            over = kv.planner.overflow
            assert over.staging_bytes() == over.read_bytes == over.away == 0
            assert not any(lane.loaded_bytes for lane in kv.planner.store.stack.mover.lanes)
            with kv.step([seq], [[1]]) as step:
                assert not step.overflows and step.decode(0) is not None
                run_rest(step)
        assert not called


def run_rest(step: Any) -> None:
    for layer in range(LAYERS):
        k, v, q = (torch.randn(1, heads, DIM) for heads in (HEADS, HEADS, 2 * HEADS))
        step.attend(layer, q, k, v)


class TestBounds:
    def test_memory_is_the_pool_and_two_stages(self) -> None:
        with small_pool() as (kv, seq, model):
            grow(kv, [seq], [model], 400)
            over, pool = kv.planner.overflow, kv.planner.store.pools["cpu"]
            assert over.staging_bytes() == 2 << 15
            assert sum(stage.arena.nbytes for stage in over._stages["cpu"]) == 2 << 15
            assert pool.arena.nbytes == pool.capacity_bytes() and over.retired == 0

    def test_pages_that_stayed_stay(self) -> None:
        """A cyclic scan: what is on the device is not read, and does not change."""
        with small_pool(16) as (kv, seq, model):
            grow(kv, [seq], [model], 400)
            line, over = kv.planner.tables.pages[0][seq.row], kv.planner.overflow
            there = [page for page in range(25) if line[page] >= 0]
            assert there[:8] == list(range(8))
            for _ in range(8):
                before = over.read_bytes
                grow(kv, [seq], [model], 1)
                stripe = over.stripe_bytes(0, 0)
                assert over.read_bytes - before <= (seq.away + 2) * stripe * LAYERS
            assert [page for page in range(8) if line[page] >= 0] == list(range(8))

    def test_nothing_is_left_of_a_closed_sequence(self) -> None:
        shape = geometry()
        with make(shape, 8, overflow=True) as kv:
            with opened(kv) as (seq,):
                grow(kv, [seq], [Noise(shape)], 300)
                twin = kv.fork(seq)
                twin.close()
            over, store = kv.planner.overflow, kv.planner.store
            assert over.away == 0 and not any(block.kept or block.holds for block in store.index)
            assert over.staging_bytes() == 0, "what came through them goes, too"

    def test_a_disk_takes_what_the_host_does_not(self, tmp_path: Path) -> None:
        with small_pool(host="512KiB", disk=f"{tmp_path}:64MiB") as (kv, seq, model):
            assert grow(kv, [seq], [model], 500) < TOLERANCE
            read = [lane.loaded_bytes for lane in kv.planner.store.stack.mover.lanes]
            assert min(read) > 0, read

    def test_without_any_room_the_sequence_is_as_before(self) -> None:
        with small_pool(host="400KiB") as (kv, seq, model):
            with pytest.raises(CapacityError):
                grow(kv, [seq], [model], 5000)
            length = seq.length
            assert length > 8 * 16 and kv.planner.tables.state[seq.row] == 1
            model.kept = {layer: [torch.cat(x)[:length]] for layer, x in model.kept.items()}
            left = -length % 16
            assert left == 0 or run(kv, [seq], [tokens(left)], [model])[1] < TOLERANCE


class TestOnADeviceOfItsOwn:
    """Pages come through pinned memory, by copies that are as late as they may be."""

    @staticmethod
    @contextmanager
    def grown(
        monkeypatch: pytest.MonkeyPatch, kind: str = "full", fault: str = "", **options: Any
    ) -> Iterator[tuple[KV, float, list[bool]]]:
        """A cache whose sequence went on past its pool: how wrong it was, and copies waited for."""
        shape, over = geometry(kind), list[bool]()
        reuse = overflow.Stage.reuse

        def noted(stage: Any) -> None:
            reuse(stage)
            if stage._sent is not None:
                over.append(stage._sent.passed)

        monkeypatch.setattr(overflow.Stage, "reuse", noted)
        with make(shape, 8, overflow=True, **options) as kv, opened(kv) as (seq,):
            behind_a_bus(kv, *(fault,) * bool(fault))
            model = Noise(shape)
            worst = grow(kv, [seq], [model], 32)
            while seq.away < 3:
                worst = max(worst, grow(kv, [seq], [model], 32))
            worst = max(worst, *(grow(kv, [seq], [model], 1) for _ in range(4)))
            yield kv, worst, over

    @pytest.mark.parametrize("kind", ["full", "sliding", "latent"])
    def test_attention_is_that_over_everything(
        self, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with self.grown(monkeypatch, kind) as (kv, worst, over):
            assert worst < TOLERANCE
            assert over and all(over), "memory was used again before it was copied"
            (pool,) = kv.planner.store.pools.values()
            stages = kv.planner.overflow._stages["cpu"]
            assert pool.copies.staged_bytes() >= sum(stage.n_bytes for stage in stages)
            assert all(stage.arena.data_ptr() != stage._row.data_ptr() for stage in stages)

    def test_sealed_pages_come_as_they_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.grown(monkeypatch, codec="kv8", recent_tokens=16) as (_, worst, over):
            assert 0 < worst < 0.05 and all(over)

    @pytest.mark.parametrize("fault", ["lead", "wait"])
    def test_a_copy_that_is_not_waited_for_shows(
        self, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        send = Copies.send

        def sent(*arguments: Any) -> FakeMark:
            mark = send(*arguments)
            mark.wait = lambda: None
            return mark

        if fault == "wait":
            monkeypatch.setattr(Copies, "send", sent)
        with self.grown(monkeypatch, fault=fault) as (_, worst, over):
            assert worst > TOLERANCE if fault == "lead" else not all(over)

    def test_nothing_is_left_of_a_closed_sequence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.grown(monkeypatch) as (kv, _, _):
            (pool,) = kv.planner.store.pools.values()
            held = pool.copies.staged_bytes()
            kv.planner.overflow._stages.clear()
            pool.copies.streams.finish()
            gc.collect()
            assert pool.copies.staged_bytes() <= held - (2 << 15)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["full", "sliding", "latent"])
@pytest.mark.parametrize("codec", ["raw", "kv8"])
def test_a_gpu_attends_to_what_it_does_not_hold(kind: str, codec: str) -> None:
    """The same steps over a pool of few pages and over one that holds all of them."""
    shape, outputs, page = geometry(kind, 64), list[list[torch.Tensor]](), 64
    groups = [msgspec.structs.replace(group, device="cuda:0") for group in shape.groups]
    shape = Geometry(groups=tuple(groups), page_size=page)
    for pages in (16, 200):
        with make(shape, pages, codec=codec, overflow=pages == 16) as kv, opened(kv) as (seq,):
            noise, found = Noise(shape), list[torch.Tensor]()
            for count in [2 * page] * 15 + [1] * 20:
                with kv.step([seq], [tokens(count, seq.length)]) as step:
                    for group in shape.groups:
                        for layer in group.layers:
                            k, v, q = (x.cuda() for x in noise.make(layer, seq.length, count))
                            value = None if group.kind == "latent" else v
                            found.append(step.attend(layer, q, k, value).cpu())
            assert (seq.away > 0) == (pages == 16)
            outputs.append(found)
    lossy = codec == "kv8"  # pages may leave before they are encoded
    for ours, theirs in zip(*outputs, strict=True):
        assert float((ours - theirs).abs().max()) < (0.05 if lossy else TOLERANCE)


class TestPrefixes:
    def test_longer_than_the_pool_are_attached_where_they_lie(self) -> None:
        shape, prompt = geometry(), tokens(400)
        with make(shape, 8, overflow=True) as kv:
            with kv.open([], reuse=False) as seq:
                model = Noise(shape)
                compute(kv, seq, prompt, model)
            before = kv.planner.overflow.read_bytes
            with kv.open(prompt) as seq:
                assert seq.length == seq.reused == 384 and seq.away >= 16
                assert kv.planner.overflow.read_bytes == before
                twin = Noise(shape)
                twin.kept = {layer: [torch.cat(x)[:384]] for layer, x in model.kept.items()}
                assert run(kv, [seq], [prompt[384:]], [twin])[1] < TOLERANCE
                assert grow(kv, [seq], [twin], 40) < TOLERANCE

    def test_prefill_cuts_chunks_that_fit(self) -> None:
        shape, prompt = geometry(), tokens(300)
        with make(shape, 8, overflow=True) as kv, kv.open(prompt, reuse=False) as seq:
            for step in kv.prefill([seq], chunk=512):
                for layer in range(LAYERS):
                    count = step.tokens.numel()
                    parts = [torch.randn(count, h, DIM) for h in (2 * HEADS, HEADS, HEADS)]
                    step.attend(layer, *parts)
            assert seq.length == 300 and seq.away


class TestWhatDoesNotCome:
    def test_is_not_served_from_a_stage_once_it_was_erased(self) -> None:
        with small_pool() as (kv, seq, model):
            grow(kv, [seq], [model], 160)
            assert seq.away > 0
            run(kv, [seq], [[1]], [model])
            kv.forget()
            with pytest.raises(StoreError, match="longer than its device"):
                run(kv, [seq], [[2]], [model])

    @pytest.mark.parametrize("how", ["lost", "damaged"])
    def test_is_an_error_of_that_sequence_alone(self, how: str) -> None:
        shape, prompt = geometry(), tokens(320)
        with make(shape, 16, overflow=True) as kv, opened(kv) as (other,):
            with kv.open([], reuse=False) as seq:
                model, calm = Noise(shape), Noise(shape, 5)
                compute(kv, seq, prompt, model)
                grow(kv, [other], [calm], 60)
                (host,) = kv.planner.store.stack.tiers
                line = kv.planner.tables.pages[0][seq.row, :20]
                number = int((line < 0).nonzero()[0][0])
                key = seq.key(0, number)
                if how == "lost":
                    host.delete([key])
                else:
                    host._frames[key].body[100] ^= 1
                length = seq.length
                with pytest.raises(StoreError, match="cannot be read any more"):
                    for _ in range(2):
                        run(kv, [seq], [[1]], [model])
                assert seq.length <= length + 1
                assert grow(kv, [other], [calm], 40) < TOLERANCE
            with kv.open(prompt) as again:
                assert again.length <= number * 16
                fresh = Noise(shape)
                fresh.kept = {i: [torch.cat(x)[: again.length]] for i, x in model.kept.items()}
                while again.length < 320:
                    step = prompt[again.length : again.length + 32]
                    assert run(kv, [again], [step], [fresh])[1] < TOLERANCE

    def test_in_time_ends_the_step_and_leaves_the_stage_to_the_tier(self) -> None:
        shape = geometry()
        tier = Silent(MemoryTier(name="slow"), kind="host")
        tier.silent = False
        size = 8 * page_layout(shape.groups[0], 16).granules * 4096
        given = dict(tiers=[f"gpu:{size}B", tier], namespace="m", load_deadline_s=0.2)
        with KV(shape, overflow=True, **given) as kv, opened(kv) as (seq,):
            model = Noise(shape)
            grow(kv, [seq], [model], 200)
            length, tier.silent = seq.length, True
            with pytest.raises(StoreError, match="deadline"):
                for _ in range(3):
                    run(kv, [seq], [[1]], [model])
            assert kv.planner.overflow.retired >= 1 and seq.length <= length + 2
            tier.scribble()
            tier.speak()

    def test_in_time_comes_from_elsewhere_and_with_it_what_had_come(self) -> None:
        shape = geometry()
        tier = Halting(MemoryTier(name="slow"), kind="host")
        tier.silent = False
        size = 8 * page_layout(shape.groups[0], 16).granules * 4096
        given = dict(tiers=[f"gpu:{size}B", tier, lasting()], load_deadline_s=0.2)
        with KV(shape, overflow=True, namespace="m", **given) as kv, opened(kv) as (seq,):
            model = Noise(shape)
            grow(kv, [seq], [model], 200)
            below = [block for block in seq.blocks[0] if block is not None and block.page < 0]
            assert below and all(block.tiers == 0b11 for block in below)
            tier.silent = True
            assert run(kv, [seq], [[1]], [model])[1] < TOLERANCE
            assert kv.planner.overflow.retired >= 1
            tier.scribble()
            tier.speak()
            assert run(kv, [seq], [[1]], [model])[1] < TOLERANCE

    @pytest.mark.parametrize("order", ["lost first", "found first"])
    def test_is_no_page_of_the_same_name_that_another_row_has(
        self, order: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A page that was lost, and its successor of another row, in one tile."""
        for name in ("LEAST_BYTES", "MOST_BYTES"):
            monkeypatch.setattr(overflow, name, 1 << 20)
        shape, prompt = geometry(), tokens(320)
        with make(shape, 16, overflow=True) as kv, opened(kv, 2) as (a, c):
            first, third = Noise(shape), Noise(shape, 9)
            compute(kv, a, prompt, first)
            (host,) = kv.planner.store.stack.tiers
            lost = int((kv.planner.tables.pages[0][a.row, :20] < 0).nonzero()[0][0])
            host._frames[a.key(0, lost)].body[100] ^= 1
            with pytest.raises(StoreError):
                for _ in range(2):
                    run(kv, [a], [[1]], [first])
            first = first.cut(a.length)
            with kv.open(prompt) as b:
                second = first.copy().cut(b.length)
                compute(kv, b, prompt, second)
                while b.blocks[0][lost].page >= 0:
                    run(kv, [c], [tokens(16, c.length)], [third])
                rows = [(a, first), (b, second)][:: 1 if order == "lost first" else -1]
                seqs, models = zip(*rows, strict=True)
                with pytest.raises(StoreError, match="cannot be read any more"):
                    run(kv, list(seqs), [[1], [1]], list(models))

    @pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
    @pytest.mark.parametrize("moment", ["before", "amid", "after"])
    def test_leaves_no_trace_of_a_request_that_was_broken_off(
        self, error: type[BaseException], moment: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with small_pool() as (kv, seq, model):
            calls, number = [0], 0
            grow(kv, [seq], [model], 200)
            over = type(kv.planner.overflow)
            name = "source" if moment == "amid" else "_load"
            real = getattr(over, name)

            def broken(*given: Any) -> Any:
                calls[0] += 1
                if calls[0] != number:
                    return real(*given)
                if moment == "after":
                    real(*given)
                raise error

            for number in range(1, 16):  # noqa: B007 (it is what `broken` compares with)
                calls[0] = 0
                with monkeypatch.context() as patch:
                    patch.setattr(over, name, broken)
                    with pytest.raises(error):
                        for _ in range(3):
                            run(kv, [seq], [[2]], [model])
                model = model.cut(seq.length)
                assert run(kv, [seq], [[2]], [model])[1] < TOLERANCE


class TestWhatIsNotServed:
    def test_is_refused(self) -> None:
        with small_pool() as (kv, seq, model):
            grow(kv, [seq], [model], 300)
            with pytest.raises(StateError, match="below its device"):
                kv.suspend(seq)
            with pytest.raises(StateError, match="below its device"):
                kv.truncate(seq, 200)
            with pytest.raises(StateError, match="below the device"), kv.step([seq], [[1]]) as step:
                step.watch()
                run_rest(step)
            with pytest.raises(StateError, match="below the device"), kv.step([seq], [[1]]) as step:
                parts = [torch.randn(1, heads, DIM) for heads in (2 * HEADS, HEADS, HEADS)]
                step.attend(0, *parts, alibi=torch.ones(2 * HEADS))
            assert grow(kv, [seq], [model], 20) < TOLERANCE

    def test_a_cut_of_pages_on_the_device_is(self) -> None:
        with small_pool() as (kv, seq, model):
            grow(kv, [seq], [model], 300)
            for cut in (296, 192):
                kv.truncate(seq, cut)
                model.kept = {layer: [torch.cat(x)[:cut]] for layer, x in model.kept.items()}
                assert run(kv, [seq], [tokens(3)], [model])[1] < TOLERANCE

    @pytest.mark.parametrize("first", [0, 1])
    def test_a_cut_within_a_page_below_is_not_in_any_group(self, first: int) -> None:
        groups = geometry("sliding").groups
        shape = Geometry(groups=(groups[first], groups[1 - first]), page_size=16)
        with small_pool(13, shape=shape) as (kv, seq, model):
            grow(kv, [seq], [model], 320)
            with pytest.raises(StateError, match="below its device"):
                kv.truncate(seq, 280)
            kv.truncate(seq, 310)
            assert run(kv, [seq], [tokens(3)], [model.cut(310)])[1] < TOLERANCE

    @pytest.mark.parametrize("pages", range(9, 14))
    def test_a_row_cut_within_a_page_keeps_it_on_the_device(self, pages: int) -> None:
        shape = geometry()
        with make(shape, pages, overflow=True) as kv, opened(kv, 2) as (seq, third):
            model, long = Noise(shape), Noise(shape, 7)
            grow(kv, [seq], [model], 96)
            with kv.fork(seq) as twin:
                other = model.copy()
                grow(kv, [twin], [other], 4)
                kv.truncate(twin, 90)  # its last page is a whole one of `seq`
                grow(kv, [third], [long], 128, chunk=16)
                assert third.away + seq.away > 0
                for row, its in ((twin, other.cut(90)), (seq, model), (third, long)):
                    assert run(kv, [row], [tokens(3)], [its])[1] < TOLERANCE

    def test_by_name(self) -> None:
        chunked = LayerGroup(
            layers=(0,), kv_heads=1, head_dim=8, value_dim=8, kind="chunked", window=8
        )
        with pytest.raises(ConfigError, match="'chunked' layers"):
            make(Geometry(groups=(chunked,), page_size=8), 8, overflow=True)
        with pytest.raises(ConfigError, match="without a place"):
            make(geometry(), 8, host=0, overflow=True)
