"""Pages that are full become known once the device has looked at them, and no step waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from flowkv import KV
from tests.cache.toy import PAGE, advance, check_content, make_kv, opened, write
from tests.inside import CODEC_SHIFT, DeviceTimer, Later, drop_unproven, seal

pytestmark = pytest.mark.at_once

TEXT = list(range(100, 100 + 4 * PAGE))


class Arrival:
    """A GPU's event: the copies before it arrive after some looks at it, or in the next step."""

    looks, steps, waits = 3, 0, 0

    def __init__(self) -> None:
        self._left, self._step = self.looks, Arrival.steps

    def query(self) -> bool:
        self._left -= 1
        return self._left < 0

    def synchronize(self) -> None:
        Arrival.waits += self._step == Arrival.steps


class Slow(Later):
    """Copies that stand in for those of a GPU."""

    def __init__(self, *values: torch.Tensor | None) -> None:
        super().__init__(*values)
        if any(v is not None and v.numel() for v in values):
            self._events: list[Any] = [Arrival()]


@pytest.fixture(autouse=True)
def slow() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seal, "Later", Slow)
        Arrival.looks, Arrival.waits = 3, 0
        yield


def test_a_timer_takes_the_time_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is recorded on the current stream of the timer's device; both must be over."""
    device, made = torch.device("cuda:1"), list[Any]()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.timed, self.over = enable_timing, False
            made.append(self)

        def record(self, stream: str) -> None:
            self.stream = stream

        def query(self) -> bool:
            return self.over

        def elapsed_time(self, end: Any) -> float:
            return 500.0 * (made.index(end) - made.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: f"stream of {of}")
    timer = DeviceTimer(device)
    timer.stop()
    assert all(event.timed and event.stream == "stream of cuda:1" for event in made)
    for event in reversed(made):
        assert timer.seconds() is None
        event.over = True
    assert timer.seconds() == 0.5 and len(made) == 2


def decode(kv: KV, seqs: list[Any], steps: int) -> None:
    """Steps whose token is read, so that the device is never more than one of them behind."""
    for turn in range(steps):
        Arrival.steps += 1
        advance(kv, seqs, [[turn % 50]] * len(seqs))


@pytest.mark.parametrize("options", [{}, dict(codec="kv8", recent_tokens=0)], ids=["raw", "kv8"])
def test_no_step_waits_while_pages_turn_over(options: dict[str, Any]) -> None:
    """Pages fill, rows end and begin again; what they leave is known to whoever comes next."""
    kv = make_kv(**options)
    seqs = [opened(kv, [7 * i + 1]) for i in range(3)]
    decode(kv, seqs, 5 * PAGE)
    assert Arrival.waits == 0 and kv.stats()["blocks"] >= 12
    seqs.pop().close()
    decode(kv, seqs, 2 * PAGE)
    assert Arrival.waits == 0
    sealed = kv.planner.store.pool(0).bytes_by_codec().get("kv8", 0)
    assert bool(sealed) == bool(options)
    within = 0.0 if not options else 0.02
    for i, seq in enumerate(seqs):
        check_content(kv, seq, seq.tokens.tolist(), within=within)
        seq.close()
        again = kv.open([7 * i + 1, *[turn % 50 for turn in range(5 * PAGE)]])
        assert again.length == 5 * PAGE
        check_content(kv, again, again.tokens[: again.length].tolist(), within=within)
        again.close()


@pytest.mark.parametrize("options", [dict(codec="kv8"), dict(codec="kv8", recent_tokens=0)])
def test_the_step_at_which_a_page_is_encoded_is_no_matter_of_time(options: Any) -> None:
    found = []
    for looks in (0, 1, 2, 9):
        Arrival.looks, kv, codecs = looks, make_kv(**options), list[Any]()
        seqs, Arrival.waits = [opened(kv, [7 * i + 1] * (9 * i + 1)) for i in range(3)], 0
        for _ in range(12 * PAGE):
            decode(kv, seqs, 1)
            rows = [seq.row for seq in seqs]
            codecs.append([table[rows] >> CODEC_SHIFT for table in kv.planner.tables.pages])
        found.append([np.hstack(each).tolist() for each in codecs])
        assert Arrival.waits == 0
        kv.close()
    assert all(each == found[0] for each in found) and np.max(found[0][-1]) > 0


def test_what_is_left_is_published_before_the_next_prompt_looks() -> None:
    kv = make_kv()
    opened(kv, TEXT).close()
    assert kv.planner.pending.work, "it closed while the device was asked"
    assert kv.open(TEXT).length >= 3 * PAGE and not kv.planner.pending.work


@pytest.mark.filterwarnings("ignore:.*NaN")
def test_nan_becomes_known_to_nobody() -> None:
    kv = make_kv()
    seq = kv.open(TEXT)
    with kv.step([seq], [TEXT]) as step:
        write(step)
        step.pages(0)
        pool = kv.planner.store.pool(0)
        pool.page_bytes(int(kv.planner.tables.pages[0][seq.row, 1]), 64).fill_(0xFF)
    decode(kv, [seq], 2 * PAGE)
    seq.close()
    assert kv.open(TEXT).length <= PAGE


def test_a_page_that_is_cut_and_written_anew_keeps_its_name() -> None:
    kv = make_kv()
    seq = opened(kv, TEXT)
    kv.truncate(seq, 2 * PAGE + 3)
    other = [*TEXT[: 2 * PAGE + 3], *range(PAGE)]
    advance(kv, [seq], [list(range(PAGE))])
    check_content(kv, seq, other)
    seq.close()
    for text in (TEXT, other):
        check_content(kv, opened(kv, text), text)


def test_a_model_that_changed_meanwhile_makes_nothing_known() -> None:
    kv = make_kv()
    seq = kv.open(TEXT)
    for step in kv.prefill([seq], chunk=len(TEXT)):
        write(step)
    seq.close()
    drop_unproven(kv)
    assert kv.open(TEXT).length == 0


def test_pages_that_are_looked_at_are_no_lack_of_room() -> None:
    kv = make_kv(pages=6)
    for first in range(8):
        text = [first * 1000 + i for i in range(4 * PAGE)]
        check_content(kv, seq := opened(kv, text), text)
        seq.close()
    assert kv.stats()["sequences"] == 0


Story = st.lists(
    st.tuples(
        st.sampled_from(["open", "decode", "fork", "cut", "close", "move"]), st.integers(0, 99)
    ),
    min_size=8,
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(Story, st.integers(1, 6), st.booleans())
def test_every_story_ends_as_if_nothing_were_late(story: Any, looks: int, encoded: bool) -> None:
    """All content is right at all times; nothing is held in the end."""
    options: dict[str, Any] = dict(codec="kv8", recent_tokens=0) if encoded else {}
    Arrival.looks, kv, seqs = looks, make_kv(pages=40, **options), list[Any]()
    for what, n in story:
        if what == "open" and len(seqs) < 4:
            seqs.append(opened(kv, TEXT[: 5 + n % (3 * PAGE)]))
        elif what == "decode" and seqs:
            decode(kv, seqs[: 1 + n % len(seqs)], 1 + n % (2 * PAGE))
        elif what == "fork" and 0 < len(seqs) < 4:
            seqs.append(kv.fork(seqs[n % len(seqs)]))
        elif what == "cut" and seqs:
            seq = seqs[n % len(seqs)]
            kv.truncate(seq, max(1, seq.length - n % 9))
        elif what == "close" and seqs:
            seqs.pop(n % len(seqs)).close()
        elif what == "move":
            kv.defragment()
        for seq in seqs:
            text = seq.tokens[: seq.length].tolist()
            check_content(kv, seq, text, within=0.03 if encoded else 0.0)
    for seq in seqs:
        seq.close()
    kv.invalidate()
    kv.planner.store.tails.drop()
    assert all(pool.used_granules == 0 for pool in kv.planner.store.pools.values())
    kv.close()
