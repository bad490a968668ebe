"""Everything a cache can be asked, in any order, against what each position must hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from flowkv import KV, Sequence
from flowkv.policy import make_policy
from flowkv.testing import FlakyTier, MemoryTier
from tests.cache.audit import audit, audit_empty
from tests.cache.fakes import Wrapped
from tests.cache.test_pinned import behind_a_bus
from tests.cache.toy import PAGE, check_content, geometry, make_kv, write
from tests.inside import CapacityError, Faults, ManualClock, StateError

TENANTS = ("alice", "bob")
# Two documents and their beginnings, at and beside page borders, with endings of their own.
PROMPTS = st.builds(
    lambda document, pages, beside, ending: (
        [1 + document] * max(0, pages * PAGE + beside) + [3] * ending
    ),
    st.integers(0, 1),
    st.integers(0, 5),
    st.sampled_from((0, 0, -1, 1)),
    st.sampled_from((0, 0, 1, PAGE)),
)


class Row:
    """What the machine knows of a sequence."""

    def __init__(self, seq: Sequence, tokens: list[int], tenant: str, asleep: bool = False) -> None:
        self.seq, self.tokens, self.tenant, self.asleep = seq, tokens, tenant, asleep

    @property
    def tag(self) -> int:
        return TENANTS.index(self.tenant)


class Machine(RuleBasedStateMachine):
    rows = Bundle("rows")
    ahead, near = False, 8 * 4096

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.open: list[Row] = []
        self.silent: set[tuple[str, tuple[int, ...]]] = set()

    def tiers(self, kind: str) -> list[Any]:
        near, far = MemoryTier(self.near, name="near"), MemoryTier(20 * 4096, name="far")
        faults = Faults(fail=0.1, lose=0.1, flip=0.1)
        stacks: dict[str, Callable[[], list[Any]]] = {
            "none": list,
            "host": lambda: [near],
            "demoting": lambda: [near, far],
            "lasting": lambda: [near, Wrapped(far, kind="disk")],
            "flaky": lambda: [
                FlakyTier(near, 7, faults),
                FlakyTier(Wrapped(far, kind="disk"), 8, faults),
            ],
        }
        return stacks[kind]()

    @initialize(
        kind=st.sampled_from(("none", "host", "demoting", "lasting", "flaky")),
        pages=st.sampled_from((6, 12, 40)),
        lease=st.booleans(),
        codec=st.sampled_from(("raw", "kv8")),
        recent=st.sampled_from((0, PAGE)),
    )
    def start(self, kind: str, pages: int, lease: bool, codec: str, recent: int) -> None:
        def policy() -> Any:
            return make_policy("lfu-ttl", lease_s=60.0) if lease else make_policy("lru")

        self.flaky = kind == "flaky"
        # A kv8 page's number is scaled to a multiple of 1/127; encoding it again changes nothing.
        self.within = 0.0 if codec == "raw" else 0.005
        self.kv: KV = make_kv(
            geometry(heads=2 if codec == "raw" else 16),  # encoded pages are of another size
            pages=pages,
            tiers=self.tiers(kind),
            policy=policy,
            clock=self.clock,
            max_rows=8,
            codec=codec,
            recent_tokens=recent,
        )
        if self.ahead:
            for copies in behind_a_bus(self.kv):
                copies.streams.behind, copies.most_bytes = not recent, 1 << 30
            for lane in self.kv.planner.store.stack.mover.lanes:
                lane.stored_bytes = 1 << 30

    # ---- sequences

    @rule(target=rows, prompt=PROMPTS, tenant=st.sampled_from(TENANTS), reuse=st.booleans())
    def open_prompt(self, prompt: list[int], tenant: str, reuse: bool) -> Any:
        if len(self.open) == 8:
            with pytest.raises(CapacityError, match="8 sequences are open"):
                self.kv.open(prompt, tenant=tenant)
            return multiple()
        seq = self.kv.open(prompt, tenant=tenant, reuse=reuse)
        assert seq.length == seq.reused <= max(0, len(prompt) - 1)
        assert seq.tokens.tolist() == prompt
        row = Row(seq, prompt, tenant)
        self.open.append(row)
        return row

    @rule(target=rows, prompt=PROMPTS, tenant=st.sampled_from(TENANTS))
    def open_and_compute(self, prompt: list[int], tenant: str) -> Any:
        row = self.open_prompt(prompt, tenant, True)
        return self.compute(row) if isinstance(row, Row) else row

    @rule(prompt=PROMPTS, tenant=st.sampled_from(TENANTS))
    def serve(self, prompt: list[int], tenant: str) -> None:
        row = self.open_prompt(prompt, tenant, True)
        if isinstance(row, Row):
            self.close(self.compute(row))

    @rule(target=rows, row=consumes(rows))
    def compute(self, row: Row) -> Row:
        while row.seq.length < len(row.tokens) and not row.asleep:
            done = row.seq.length
            self.step([row], [11], 0, False)
            if row.seq.length == done:
                break  # the pages do not fit
        return row

    @rule(target=rows, row=rows)
    def fork(self, row: Row) -> Any:
        if row.asleep or len(self.open) == 8:
            with pytest.raises((StateError, CapacityError)):
                self.kv.fork(row.seq)
            return multiple()
        child = Row(self.kv.fork(row.seq), list(row.tokens), row.tenant)
        self.open.append(child)
        return child

    @rule(row=consumes(rows))
    def close(self, row: Row) -> None:
        row.seq.close()
        row.seq.close()
        self.open.remove(row)

    # ---- steps

    @rule(
        batch=st.lists(rows, min_size=1, max_size=3, unique_by=id),
        counts=st.lists(st.integers(0, 20), min_size=3, max_size=3),
        token=st.integers(1, 3),
        fail=st.sampled_from((False, False, True)),
    )
    def step(self, batch: list[Row], counts: list[int], token: int, fail: bool) -> None:
        fresh = []
        for row, count in zip(batch, counts, strict=False):
            done = row.seq.length
            pending = row.tokens[done : done + count]
            fresh.append(pending + [token] * (count - len(pending)))
        before = [(row.seq.length, row.seq.tokens.tolist()) for row in batch]
        try:
            with self.kv.step([row.seq for row in batch], fresh) as step:
                write(step, [row.tag for row in batch])
                if fail:
                    raise ZeroDivisionError
        except (CapacityError, ZeroDivisionError, StateError) as error:
            assert not isinstance(error, StateError) or any(row.asleep for row in batch)
            assert before == [(row.seq.length, row.seq.tokens.tolist()) for row in batch]
            return
        for row, ids, (length, _) in zip(batch, fresh, before, strict=True):
            row.tokens = row.tokens[:length] + ids + row.tokens[length + len(ids) :]

    @rule(row=rows, cut=st.integers(0, 40))
    def truncate(self, row: Row, cut: int) -> None:
        length = max(0, row.seq.length - cut)
        if row.asleep and length < row.seq.length:
            with pytest.raises(StateError):
                self.kv.truncate(row.seq, length)
            return
        try:
            self.kv.truncate(row.seq, length)
        except StateError as error:
            assert "sliding window" in str(error)
            return
        row.tokens = row.tokens[:length]

    @rule(row=rows)
    def suspend_or_resume(self, row: Row) -> None:
        if not row.asleep:
            self.kv.suspend(row.seq)
            row.asleep = True
            return
        try:
            self.kv.resume(row.seq)
        except CapacityError:
            return
        row.asleep = False

    # ---- what is known

    @rule(prompt=PROMPTS, tenant=st.sampled_from(TENANTS))
    def forget(self, prompt: list[int], tenant: str) -> None:
        self.kv.forget(prompt, tenant=tenant)
        for token in (1, 2, 3):
            known = self.kv.explain(prompt + [token] * (PAGE + 1), tenant=tenant).known
            assert known < len(prompt) or not known
        assert self.kv.forget(prompt, tenant=tenant) == 0

    @rule(tenant=st.sampled_from(TENANTS))
    def forget_tenant(self, tenant: str) -> None:
        self.kv.forget(tenant=tenant)
        assert self.kv.explain([0] * 30, tenant=tenant).known == 0

    @rule()
    def invalidate(self) -> None:
        self.kv.invalidate()
        assert self.kv.stats()["blocks"] == 0

    @rule(prompt=PROMPTS, tenant=st.sampled_from(TENANTS), pinned=st.booleans())
    def pin(self, prompt: list[int], tenant: str, pinned: bool) -> None:
        self.kv.pin(prompt, tenant=tenant, pinned=pinned)

    @rule(prompt=PROMPTS, tenant=st.sampled_from(TENANTS))
    def warm(self, prompt: list[int], tenant: str) -> None:
        if len(self.open) < 8:
            assert self.kv.warm(prompt, tenant=tenant) <= len(prompt)

    @rule(prompt=PROMPTS, tenant=st.sampled_from(TENANTS), cancel=st.booleans())
    def prefetch(self, prompt: list[int], tenant: str, cancel: bool) -> None:
        coming = self.kv.prefetch(prompt, tenant=tenant)
        if cancel:
            coming.cancel()
        assert coming.wait(5.0) and coming.arrived <= coming.pages

    # ---- upkeep

    @rule()
    def defragment(self) -> None:
        self.kv.defragment()

    @rule()
    def evict(self) -> None:
        with self.kv.lock:
            self.kv.planner.store.eviction.make_room(0, 1)

    @rule(seconds=st.sampled_from((1.0, 40.0)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(s=seconds)
        with self.kv.lock:
            self.kv.planner.store.eviction.expire()

    @rule()
    def flush(self) -> None:
        written = self.kv.flush(5.0)
        assert written or self.flaky, "only such tiers lose pages"
        assert not self.kv.planner.store.writes.unsaved

    # ---- what must hold

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "kv"):
            audit(self.kv)

    @invariant()
    def holds_what_was_computed(self) -> None:
        for row in self.open:
            if not row.asleep:
                tokens = row.tokens[: row.seq.length]
                check_content(self.kv, row.seq, tokens, row.tag, self.within)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for row in self.open:
            row.seq.close()
        self.kv.flush()
        for tenant in TENANTS:
            self.kv.forget(tenant=tenant)
        audit_empty(self.kv)
        assert all(tier.used_bytes() == 0 for tier in self.kv.planner.store.stack.tiers)
        self.kv.close()


def test_any_order_of_calls() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=100, stateful_step_count=40))


@pytest.mark.deep
def test_any_order_of_calls_at_length() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=1500, stateful_step_count=60))
