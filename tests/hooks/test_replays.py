"""Replayed steps of a model of one's own: any rows, lengths and pages, and steps that are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flowkv
from tests.hooks.recorder import recorded
from tests.hooks.test_graphs import Latents, Nano, counts, geometry, latents
from tests.inside import StaticStep, graphs, shape_of

Rows = st.lists(st.tuples(st.integers(1, 40), st.integers(2, 24)), min_size=1, max_size=5)
"""Tokens of a prompt, and of its answer, of each row."""


def answers(
    rows: list[tuple[int, int]], size: int, window: int | None, codec: str, *, graphed: bool
) -> tuple[list[torch.Tensor], int]:
    """Logits of all steps, in which rows end one by one, and how many steps were replayed."""
    model, shape, found = Nano(layers=1), geometry(1, size, window), list[torch.Tensor]()
    if codec == "latent":
        model, shape, codec = Latents(), latents(size), "raw"
    options: dict[str, Any] = dict(gpu="8MiB", codec=codec, recent_tokens=0, namespace="nano")
    with recorded(), flowkv.KV(shape, **options) as kv, torch.no_grad():
        run = flowkv.graphed(model, kv) if graphed else model
        seqs = [kv.open([*range(n, n + length)], reuse=False) for n, (length, _) in enumerate(rows)]
        for step in kv.prefill(seqs):
            model(step.tokens, step.positions)
        for turn in range(max(new for _, new in rows)):
            live = [seq for seq, (_, new) in zip(seqs, rows, strict=True) if turn < new]
            with kv.step(live, [[(7 * turn + n) % 60] for n in range(len(live))]) as step:
                found.append(run(step.tokens, step.positions))
        for seq in seqs:
            seq.close()
        return found, counts(kv)[1]


Codecs = st.sampled_from(["raw", "kv8", "latent"])


@settings(max_examples=12, deadline=None)
@given(Rows, st.sampled_from([8, 16, 32]), st.sampled_from([None, 20]), Codecs)
def test_any_rows_lengths_and_pages(
    rows: list[tuple[int, int]], size: int, window: int | None, codec: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "EAGER_STEPS", 0)
        found, replayed = answers(rows, size, window, codec, graphed=True)
    wanted, none = answers(rows, size, window, codec, graphed=False)
    assert not none and len(found) - replayed <= 9, "a shape is captured once"
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def apart(step: Any) -> None:
    step.apart = True


def audits(step: Any) -> None:
    step.audits = True


def overflows(step: Any) -> None:
    step.overflows = True


def watched(step: Any) -> None:
    step.watch()


def waits(step: Any) -> None:
    step.awaits = lambda layer: None


def plain(step: Any) -> None:
    pass


@pytest.mark.parametrize("kind", [apart, audits, overflows, watched, waits, plain])
@pytest.mark.parametrize("after", [0, 8])
def test_steps_that_differ_in_more_than_integers(kind: Callable[[Any], None], after: int) -> None:
    """They are neither captured nor replayed, also where a graph of their shape is there."""
    model = Nano(layers=1)
    with recorded(), flowkv.KV(geometry(1, 16), gpu="8MiB") as kv, torch.no_grad():
        run = flowkv.graphed(model, kv)
        seq = kv.open([*range(9)], reuse=False)
        for step in kv.prefill([seq]):
            model(step.tokens, step.positions)
        for turn in range(after + 6):
            before = counts(kv)
            with kv.step([seq], [[turn]]) as step:
                if turn >= after:
                    kind(step)
                run(step.tokens, step.positions)
            if turn >= after and kind is not plain:
                assert counts(kv) == before
        seq.close()
        assert (counts(kv)[1] > 0) == (after > 0 or kind is plain)


def test_a_step_is_captured_on_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own capture stream belongs to the device of the first capture in a process."""
    said: list[Any] = []

    @contextmanager
    def entered(what: str, value: Any) -> Iterator[None]:
        said.append((what, value))
        yield

    def run() -> torch.Tensor:
        said.append("run")
        assert graphs._CAPTURING.locked(), "one capture at a time"
        return torch.zeros(1)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: (device, priority))
    monkeypatch.setattr(torch.cuda, "device", partial(entered, "device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    monkeypatch.setattr(torch.cuda, "stream", partial(entered, "stream"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream=None, **_: entered(graph, stream))
    second = torch.device("cuda:1")
    graphs._capture_stream.cache_clear()
    graphs.CudaRecorder(second).record(run)
    graphs._capture_stream.cache_clear()
    own = "stream", ("stream of", second)
    assert said == [("device", second), own, "run", ("graph", (second, -1)), "run"]
    assert not graphs._CAPTURING.locked()


def test_a_capture_that_fails_gives_the_stream_of_its_thread_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch itself leaves a thread on the stream of a capture that it cannot end."""

    class Graph:
        def capture_begin(self, **_: Any) -> None:
            assert now == ["side"]

        def capture_end(self) -> None:
            raise RuntimeError("capture was invalidated")

    now = ["own"]
    stream = {name: SimpleNamespace(name=name, device=0) for name in ("own", "side")}
    fakes = dict(
        CUDAGraph=Graph,
        current_stream=lambda *_: stream[now[0]],
        set_stream=lambda stream: now.__setitem__(0, stream.name),
        device=lambda _: nullcontext(),
        _get_device_index=lambda *_: 0,
        synchronize=lambda: None,
        memory_reserved=lambda: 0,
    )
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(graphs, "_capture_stream", lambda _: stream["side"])
    with pytest.raises(RuntimeError, match="invalidated"):
        graphs.CudaRecorder(torch.device("cuda:0")).record(lambda: torch.zeros(1))
    assert now == ["own"]


def test_a_buffer_is_written_again_after_the_copy_out_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy runs on the stream of the model's device, whatever device is the thread's own."""
    said: list[Any] = []

    class Event:
        def synchronize(self) -> None:
            said.append("waits")

        def record(self, stream: Any) -> None:
            said.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    with flowkv.KV(geometry(1, 16), gpu="8MiB") as kv:
        seq = kv.open([*range(9)], reuse=False)
        static = StaticStep(kv.planner, shape_of(1, 1, 1, 4), torch.device("cpu"))
        static._stages = [(*stage[:2], Event()) for stage in static._stages]
        with kv.step([seq], [[*range(9)]]) as step:
            static.fill(step, torch.tensor([1]), torch.tensor([2]))
            step.rollback()
        seq.close()
    assert said == ["waits", ("stream of", torch.device("cpu"))]


def test_rows_that_lost_tokens_and_rows_of_several_are_not_replayed() -> None:
    model = Nano(layers=1)
    with recorded(), flowkv.KV(geometry(1, 16), gpu="8MiB") as kv, torch.no_grad():
        run = flowkv.graphed(model, kv)
        seq = kv.open([*range(40)], reuse=False)
        for step in kv.prefill([seq]):
            model(step.tokens, step.positions)
        for turn in range(6):
            with kv.step([seq], [[turn, turn + 1]]) as step:
                run(step.tokens, step.positions)
        assert counts(kv) == (0, 0)
        with kv.step([seq], [[1]]) as step:
            step.watch()
            run(step.tokens, step.positions)
        assert kv.sparsify(seq, budget_tokens=32) > 0
        for turn in range(6):
            with kv.step([seq], [[turn]]) as step:
                run(step.tokens, step.positions)
        assert counts(kv) == (0, 0)
        seq.close()
