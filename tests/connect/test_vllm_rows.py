"""Chunks of vLLM at one to two bits a value: keys and values come back, or nothing does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.connect.test_vllm import HIT, MISS, TransferJob, chain, door, request, spec, weights
from tests.inside import (
    BasisFile,
    ConfigError,
    ErasureLog,
    PageCoder,
    RowForm,
    new_entry,
    save_basis,
)
from tests.kvt.pages import Source, group, layout, learner, page
from tests.kvt.test_rows import row_of

LAYERS, HEADS, DIM, SIZE, ROWS = 3, 2, 16, 64, 8
CHUNKS = 6
KEYS = chain("a", CHUNKS)


@lru_cache
def source_of(seed: int = 0) -> tuple[Source, BasisFile]:
    source = Source(layout(), seed, bias=5.0)
    return source, BasisFile("org/learned", group(), SIZE, learner(source).coder(2e-3, {}).data)


@pytest.fixture
def basis_of(tmp_path: Path) -> Callable[..., str]:
    def of(seed: int = 0) -> str:
        save_basis(path := tmp_path / f"{seed}.kvt", source_of(seed)[1])
        return str(path)

    return of


class Rows:
    """Rows of a CPU cache with a tier of FlowKV's below, and prompts of a model's keys and values.

    Args:
        tmp_path: Folder of the place and the model.
        named: Layout of vLLM.
        ranks: Ranks of tensor parallelism.
        blocks: Blocks of a chunk.
        dtype: Of the cache.
        changes: Of vLLM's configuration.
        of: Options of the tier.
    """

    def __init__(
        self, tmp_path: Path, named: str = "LBNHC", ranks: int = 1, blocks: int = 1,
        dtype: str = "bfloat16", changes: dict[str, Any] | None = None, **of: Any,
    ) -> None:  # fmt: skip
        size = {"R": ranks, "L": LAYERS, "B": blocks, "H": HEADS // ranks, "N": SIZE // blocks}
        self.form = RowForm("R" + named[:-1], size, DIM, dtype)
        self.row_bytes = self.form.filled_bytes + 4096
        self.pages = PageCoder(layout(), source_of()[1].data).fitted(layout(dtype))
        said = spec(str(weights(tmp_path)), dtype=dtype, layout=named)
        config = said.config
        config.groups[0].layer_names = tuple(map(str, range(LAYERS)))
        config.groups[0].tokens_per_block = SIZE // blocks
        said.blocks_per_chunk = blocks
        config.parallel.tp_size = config.parallel.world_size = ranks
        config.worker_kv_bytes_per_block = self.form.filled_bytes // ranks // blocks
        for name, value in (changes or {}).items():
            where, _, last = name.rpartition(".")
            vars(getattr(config, where) if where else config)[last] = value
        self.memory = np.zeros((ROWS, self.row_bytes), np.uint8)
        said.tokens_per_block = (SIZE // blocks,) * len(config.groups)
        of.setdefault("places", f"disk:{tmp_path}/kv:32MiB")
        self.tier = door.FlowKVTier(said, memoryview(self.memory), "FlowKVTier", **of)
        self.jobs = 0

    def prompt(self, seed: int = 0) -> list[bytes]:
        """The rows of a prompt."""
        bodies = (page(self.pages, source_of(seed)[0], n) for n in range(CHUNKS))
        return [bytes(row_of(self.form, self.pages, body, 4096)) for body in bodies]

    def run(self, keys: Sequence[bytes], *, load: bool) -> Any:
        self.jobs += 1
        context = request(f"{load} {self.jobs}", KEYS)
        for at, key in enumerate(KEYS):
            context.set_offload_key_position(key, (at + 1) * SIZE)
        if load:
            self.tier.on_new_request(context)
            assert [self.tier.lookup(key, context) for key in keys] == [HIT] * len(keys)
        job = TransferJob(self.jobs, keys, np.arange(len(keys)), load, context)
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        end_s = time.monotonic() + 240
        while not (done := list(self.tier.get_finished_jobs())):
            assert time.monotonic() < end_s
            time.sleep(0.001)
        self.tier.on_request_finished(context)
        return done[0]

    def store(self, rows: Sequence[bytes], keys: Sequence[bytes] = KEYS) -> None:
        for at, row in enumerate(rows):
            self.memory[at] = np.frombuffer(row, np.uint8)
        assert self.run(keys, load=False).success
        assert not (self.tier._coded and self.tier._coded._numbers)

    def load(self, keys: Sequence[bytes] = KEYS) -> dict[bytes, bytes]:
        """The rows that can be loaded."""
        self.memory[:] = 0x55
        result = self.run(keys, load=True)
        good = keys if result.success else result.successful_keys or ()
        return {key: self.memory[at].tobytes() for at, key in enumerate(keys) if key in good}

    def distance(self, row: bytes, wanted: bytes) -> float:
        """Of the keys and values of two rows, in parts of the latter's."""
        both = zip(*(self.form.sides(memoryview(bytearray(x))) for x in (row, wanted)), strict=True)
        return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in both)

    def sizes(self) -> list[int]:
        """Bytes of the frames of chunks in the first place."""
        tier = self.tier.keeper.levels[0].tier
        return [entry.n_bytes for entry in tier.scan() if entry.info.kind == "page"]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rows]]:
    made = list[Rows]()

    def new(*args: Any, **of: Any) -> Rows:
        for one in made:
            one.tier.keeper.close()
        made.append(Rows(tmp_path, *args, **of))
        return made[-1]

    yield new
    for one in made:
        one.tier.shutdown()


PARTS = [(1, 1), (2, 1), (1, 4), (2, 2)]
CUT = [  # each order of axes with two ways to cut pages, each way with two orders or three
    (named, *PARTS[(number + more) % 4])
    for number, named in enumerate(["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
    for more in (0, 2)
]


@pytest.mark.parametrize(("named", "ranks", "blocks"), CUT)
def test_a_later_process_finds_keys_and_values(
    make: Callable[..., Rows], basis_of: Callable[..., str], named: str, ranks: int, blocks: int
) -> None:
    of: dict[str, Any] = {"codec": "kvt", "basis": basis_of()}
    rows = make(named, ranks, blocks, **of)
    prompt = rows.prompt()
    rows.store(prompt)
    assert max(rows.sizes()) < 0.6 * rows.form.filled_bytes
    rows = make(named, ranks, blocks, **of)
    found = rows.load()
    assert list(found) == KEYS
    assert all(rows.distance(found[k], row) < 0.1 for k, row in zip(KEYS, prompt, strict=True))
    assert all(row[rows.form.filled_bytes :] == b"\x55" * 4096 for row in found.values())
    assert rows.load() == found


def test_a_basis_names_its_chunks(make: Callable[..., Rows], basis_of: Callable[..., str]) -> None:
    """Neither a reader of exact chunks nor one with another basis finds them, and vice versa."""
    readers: list[dict[str, Any]] = [
        {},
        {"codec": "kvt", "basis": basis_of()},
        {"codec": "kvt", "basis": basis_of(7)},
    ]
    for writer in readers:
        rows = make(**writer)
        rows.store(rows.prompt()[:1], KEYS[:1])
        for reader in readers:
            rows = make(**reader)
            context = request("r", KEYS)
            rows.tier.on_new_request(context)
            said = rows.tier.lookup(KEYS[0], context)
            assert said is (HIT if reader == writer else MISS)
            rows.tier.on_request_finished(context)
        rows = make(**writer)
        rows.tier.keeper.caller().delete([rows.tier._name(KEYS[0])])


def test_chunks_that_the_basis_does_not_fit_come_back_exactly(
    make: Callable[..., Rows], basis_of: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = make(codec="kvt", basis=basis_of())
    prompt = [*rows.prompt()[:2], *rows.prompt(seed=7)[2:4], *rows.prompt()[4:]]
    rows.store(prompt)
    found = rows.load()
    exact = [found[key] == row for key, row in zip(KEYS, prompt, strict=True)]
    assert exact == [False, False, True, True, False, False]
    assert "are stored in raw: the basis" in caplog.text
    tier = rows.tier.keeper.levels[0].tier
    assert {entry.info.fidelity for entry in tier.scan() if entry.info.kind == "page"} == {5}


def test_damage_is_a_miss(
    make: Callable[..., Rows], basis_of: Callable[..., str], tmp_path: Path
) -> None:
    """Every bit that is stored counts: whatever flips, a chunk is as it was, or is not there."""
    rows = make(codec="kvt", basis=basis_of())
    rows.store(rows.prompt())
    whole, random = rows.load(), np.random.default_rng(3)
    (slab,) = (tmp_path / "kv").glob("slab-*")
    data = slab.read_bytes()
    used = np.flatnonzero(np.frombuffer(data, np.uint8))
    lost = 0
    for at in random.choice(used, 12):
        rows = make(codec="kvt", basis=basis_of())
        rows.tier.keeper.close()
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << int(random.integers(8))
        slab.write_bytes(spoilt)
        rows = make(codec="kvt", basis=basis_of())
        context = request("r", KEYS)
        there = [key for key in KEYS if rows.tier.lookup(key, context) is HIT]
        rows.tier.on_request_finished(context)
        found = rows.load(there)
        assert all(whole[key] == row for key, row in found.items())
        lost += len(found) < CHUNKS
        rows.tier.keeper.close()
        slab.write_bytes(data)
    assert lost >= 10


def test_chunks_go_up_as_they_lie(
    make: Callable[..., Rows], basis_of: Callable[..., str], tmp_path: Path
) -> None:
    """A copy in a faster place is not coded anew, which would lose more."""
    of: dict[str, Any] = {"codec": "kvt", "basis": basis_of()}
    of["places"] = ["host:4MiB", f"disk:{tmp_path}/kv:32MiB"]
    rows = make(**of)
    rows.store(rows.prompt())
    rows = make(**of)
    found, end_s = rows.load(), time.monotonic() + 30
    while len(sizes := rows.sizes()) < CHUNKS:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert max(sizes) < 0.6 * rows.form.filled_bytes
    assert rows.load() == found


def test_what_another_process_erases_leaves_memory(
    make: Callable[..., Rows], basis_of: Callable[..., str]
) -> None:
    rows = make(codec="kvt", basis=basis_of())
    rows.store(rows.prompt())
    rows.load()
    tier = rows.tier.keeper.levels[0].tier
    assert len(tier.bases.recent) == CHUNKS
    log = ErasureLog(tier.erasure_log)
    with log.erasing():
        log.publish(new_entry([rows.tier._name(KEYS[2])]))
    context = request("r", KEYS)
    assert [rows.tier.lookup(key, context) is HIT for key in KEYS[:3]] == [True, True, False]
    assert not tier.bases.recent
    log.close()


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"groups": spec("m").config.groups * 2}, "several kinds"),
    ({"kv_cache_layout": "LHBNC"}, "LHBNC"),
    ({"kv_cache_layout": None}, "None"),
    ({"model.dtype": "fp8_e4m3"}, "fp8_e4m3"),
    ({"parallel.world_size": 2}, "tensor parallelism"),
    ({"parallel.dcp_size": 2}, "tensor parallelism"),
    ({"worker_kv_bytes_per_block": 64 * 576 * 2 * 3}, "latents"),
]


@pytest.mark.parametrize(("change", "said"), UNFIT, ids=[said for _, said in UNFIT])
def test_what_has_no_code_stays_as_it_is(
    make: Callable[..., Rows], basis_of: Callable[..., str], change: dict[str, Any], said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One warning names the reason and the remedy; chunks are those of a tier without a codec."""
    rows = make(changes=change, codec="kvt", basis=basis_of())
    (warning,) = [one.getMessage() for one in caplog.records if "kvt" in one.getMessage()]
    assert said in warning and "flowkv calibrate" in warning
    prompt = rows.prompt()
    rows.store(prompt)
    rows = make(changes=change)
    assert [*rows.load().values()] == prompt


@pytest.mark.parametrize(
    "options",
    [{"codec": "kvt"}, {"basis": "a.kvt"}, {"codec": "kv8"}, {"codec": "kv8", "basis": "a.kvt"}],
)
def test_options_that_are_none(make: Callable[..., Rows], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="flowkv calibrate"):
        make(**options)


def test_a_basis_that_is_not_there(make: Callable[..., Rows], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*flowkv calibrate"):
        make(codec="kvt", basis=str(tmp_path / "none"))
