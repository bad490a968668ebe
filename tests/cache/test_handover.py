"""Pages handed from one process to another while they are computed, and shared between ranks."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from flowkv import KV, Geometry, Step, Tier, kernels
from flowkv.testing import FlakyTier
from flowkv.tiers.shared import SharedTier
from tests.inside import CapacityError, Faults, Prefetch, StateError, file_name, follow

from . import toy
from .audit import audit
from .fakes import lasting
from .links import evict
from .relay import PAGE, PROMPT, fresh_answer, geometry

PAGES = (len(PROMPT) - 1) // PAGE
SLOW_S = 0.2
NUMBERS = itertools.count()


class Process:
    """A worker that takes orders."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.cache.relay"]
        self.pipes = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, do: str, **order: Any) -> None:
        assert self.pipes.stdin is not None
        self.pipes.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.pipes.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.pipes.stdout is not None
        found: dict[str, Any] = json.loads(self.pipes.stdout.readline())
        return found

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        self.tell(do, **order)
        return self.hear()

    def end(self) -> None:
        self.pipes.kill()
        self.pipes.communicate()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Process, Process]]:
    both = Process(), Process()
    try:
        yield both
    finally:
        for process in both:
            process.end()


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return fresh_answer(PROMPT)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A tier that two processes can open: shared memory, or a directory."""
    if request.param == "disk":
        yield f"disk:{tmp_path}/kv:8MiB"
        return
    name = f"test-{os.getpid()}-{next(NUMBERS)}"
    try:
        yield f"host:{name}:8MiB"
    finally:
        (Path("/dev/shm") / file_name(name)).unlink(missing_ok=True)


BOTH = pytest.mark.parametrize("place", ["host", "disk"], indirect=True)


@BOTH
def test_pages_arrive_before_the_last_is_computed(
    pair: tuple[Process, Process], place: str, wanted: list[int]
) -> None:
    sender, receiver = pair
    sender.ask("open", tier=place)
    receiver.ask("open", tier=place)
    receiver.tell("receive", patience_s=30.0)
    sent = sender.ask("send", layer_s=SLOW_S, chunk=40)
    got = receiver.hear()
    assert got["tokens"] == wanted
    assert got["forwards"] == [len(PROMPT) - PAGES * PAGE]  # nothing was computed twice
    assert got["known"] == len(PROMPT) - 1
    assert min(got["times"]) < sent["ended"] - SLOW_S, "the first came while others were computed"
    assert sender.ask("close")["kinds"].count("page") == PAGES
    receiver.ask("close")


@pytest.mark.parametrize("place", ["host"], indirect=True)
def test_a_sender_that_never_sends(
    pair: tuple[Process, Process], place: str, wanted: list[int]
) -> None:
    _, receiver = pair
    receiver.ask("open", tier=place)
    got = receiver.ask("receive", patience_s=0.05)
    assert got["tokens"] == wanted
    assert sum(got["forwards"]) == len(PROMPT)
    receiver.ask("close")


@BOTH
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_sender_killed_before_or_meanwhile(
    pair: tuple[Process, Process], place: str, wanted: list[int], meanwhile: bool
) -> None:
    sender, receiver = Process(), pair[1]
    try:
        sender.ask("open", tier=place)
        receiver.ask("open", tier=place)
        if meanwhile:
            receiver.tell("receive", patience_s=1.0)
        sender.tell("send", layer_s=0.02 * meanwhile, chunk=40, die_after=2 - meanwhile)
        assert meanwhile or sender.pipes.wait(60) == -9
        got = receiver.hear() if meanwhile else receiver.ask("receive", patience_s=0.1)
        assert sender.pipes.wait(60) == -9
        assert got["tokens"] == wanted
        assert sum(got["forwards"]) == len(PROMPT) - (40 if meanwhile else 80) // PAGE * PAGE
        receiver.ask("close")
    finally:
        sender.end()


def test_who_can_send() -> None:
    nobody = pytest.raises(StateError, match="host:NAME")
    with KV(geometry(), gpu="4MiB") as kv, nobody, kv.hand_over():
        pass
    with toy.make_kv(toy.simple(), tiers=["host:64KiB"]) as kv, nobody, kv.hand_over():
        pass


# ---- in one process: every kind of page, and everything that can go wrong


def shape(codec: str) -> Geometry:
    """Four layers in two groups; of codecs, with pages and heads large enough."""
    if codec == "raw":
        return toy.geometry(layers=4)
    return Geometry.uniform(layers=2, kv_heads=2, head_dim=64, page_size=64)


def write(step: Step) -> None:
    """Like `toy.write`, layer by layer as a model does."""
    geometry = step.seqs[0].planner.geometry
    (seq,), (count,) = step.seqs, step.counts.tolist()
    for layer in sorted(layer for group in geometry.groups for layer in group.layers):
        known = seq.tokens[: seq.length + count].tolist()
        k, v = toy.keys_values(geometry, layer, known, seq.length)
        kernels.append(k, v, step.pages(layer), step.batch(geometry.locate(layer)[0]))
        step.appended(layer)


@settings(max_examples=12)
@given(
    codec=st.sampled_from(("raw", "raw", "kv8")),
    length=st.integers(1, 4),
    known=st.integers(0, 2),
    late=st.integers(0, 2),
    chunk=st.sampled_from((5, 16, 200)),
    fail=st.sampled_from((0.0, 0.0, 0.1, 0.5)),
    seed=st.integers(0, 99),
)
def test_whatever_arrives_is_right(
    tmp_path_factory: pytest.TempPathFactory,
    codec: str,
    length: int,
    known: int,
    late: int,
    chunk: int,
    fail: float,
    seed: int,
) -> None:
    home, geometry = tmp_path_factory.mktemp("shm"), shape(codec)
    size = geometry.page_size
    prompt = [(seed * 31 + 7 * n * n) % 50 for n in range(length * size + 3)]

    def place(number: int) -> Tier:
        tier = SharedTier("x", 8 << 20, directory=home)
        faults = Faults(fail=fail, lose=fail / 2, flip=fail)
        return FlakyTier(tier, seed + number, faults) if fail else tier

    with toy.make_kv(geometry, tiers=[place(1)], codec=codec) as first:
        toy.published(first, prompt[: known * size])  # the sender need not compute these
        with toy.make_kv(geometry, tiers=[place(2)], codec=codec) as second:
            with first.hand_over(), first.open(prompt, reuse=bool(seed % 2)) as seq:
                for step in first.prefill([seq], chunk=chunk):
                    write(step)
            with second.open(prompt, limit=late * size) as seq:
                second.take_over(seq, write, patience_s=0.02)
                toy.check_content(second, seq, prompt, within=0.02 if codec == "kv8" else 0.0)
                assert fail or seq.reused == length * size
            audit(second)
        audit(first)
    SharedTier("x", 8 << 20, directory=home).remove()


def test_nothing_is_kept_back_that_would_not_pay_here(tmp_path: Path) -> None:
    prompt = list(range(30))
    with toy.make_kv(toy.simple(), tiers=[SharedTier("x", 1 << 20, directory=tmp_path)]) as kv:
        kv.gate.pays_to_store = lambda *_: False
        toy.published(kv, [99, *prompt])
        with kv.hand_over(), kv.hand_over():
            toy.published(kv, prompt)
        toy.published(kv, [98, *prompt])
        names = [entry.info.tokens for entry in kv.planner.store.stack.tiers[0].scan()]
        assert names.count(kv.page_size) == len(prompt) // kv.page_size


def test_pages_are_handed_over_where_nothing_is_written_down_else() -> None:
    tier, proofs = lasting(), list[int]()
    with toy.make_kv(toy.simple(), tiers=[tier], write_back=False) as kv:
        toy.published(kv, [99] * 24)
        assert kv.flush() and not list(tier.scan())
        follow(kv, prove=lambda _: proofs.append(len(list(tier.scan()))))
        with kv.hand_over():
            assert proofs == [0], "what is computed from here on need not wait for a proof"
            toy.published(kv, [98] * 24)
        assert len(list(tier.scan())) == 3


def test_what_was_handed_over_is_taken_whatever_loading_takes() -> None:
    tier, prompt = lasting(), list(range(30))
    with toy.make_kv(toy.simple(), tiers=[tier]) as kv:
        toy.published(kv, prompt)
        evict(kv)
        kv.gate.worth = lambda *_: False
        with kv.open(prompt) as seq:
            assert seq.reused == 0
            kv._bring = lambda seq: Prefetch(kv.planner.store, kv.loader, kv.lock)  # brings nothing
            kv.take_over(seq, write, patience_s=1.0)
            assert seq.reused == kv.tokens_reused == 24
            toy.check_content(kv, seq, prompt)


def test_a_takeover_that_fails_leaves_the_counts_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier, prompt = lasting(), list(range(30))
    with toy.make_kv(toy.simple(), tiers=[tier]) as kv:
        toy.published(kv, prompt)
        with kv.open(prompt, limit=8) as seq:

            def full(*_: object, **__: object) -> int:
                raise CapacityError("it is full", "Wait")

            with monkeypatch.context() as patch, pytest.raises(CapacityError):
                patch.setattr(kv.restorer, "restore", full)
                kv.take_over(seq, write, patience_s=1.0)
            assert kv.tokens_reused == seq.reused == 8


def test_a_closed_sequence_takes_nothing_over_at_once() -> None:
    with toy.make_kv(toy.simple(), tiers=[lasting()]) as kv:
        seq = kv.open(list(range(30)))
        seq.close()
        started = time.monotonic()
        with pytest.raises(StateError):
            kv.take_over(seq, write, patience_s=5.0)
        assert time.monotonic() - started < 4.0


def test_errors_of_the_model_pass_through(tmp_path: Path) -> None:
    tier = SharedTier("x", 1 << 20, directory=tmp_path)
    with toy.make_kv(toy.simple(), tiers=[tier]) as kv, kv.open(list(range(20))) as seq:

        def broken(step: Step) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            kv.take_over(seq, broken, patience_s=0.02)
        assert seq.length == 0  # nothing arrived, and nothing is believed to
        assert kv.take_over(seq, write, patience_s=0.02) is None
        toy.check_content(kv, seq, list(range(20)))
        audit(kv)
