"""A cache on a directory that is closed, killed, damaged and opened again at any moment."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from flowkv import KV
from tests.cache.audit import audit
from tests.cache.test_machine import PROMPTS, TENANTS
from tests.cache.toy import check_content, make_kv, prefill


class Restarts(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="flowkv-test-"))
        self.directory = self.home / "0"
        self.erased = set[str]()  # tenants of whom nothing may be known
        self.abandoned: list[KV] = []
        self.kv = self.start()

    def start(self) -> KV:
        return make_kv(pages=8, tiers=[f"disk:{self.directory}:1MiB"])

    @rule(prompt=PROMPTS, tenant=st.sampled_from(TENANTS), salt=st.integers(0, 3))
    def serve(self, prompt: list[int], tenant: str, salt: int) -> None:
        prompt, tag = [*prompt, salt], TENANTS.index(tenant)
        with self.kv.open(prompt, tenant=tenant) as seq:
            assert not (seq.reused and tenant in self.erased)
            check_content(self.kv, seq, prompt[: seq.length], tag)
            if len(prompt) < 50:
                prefill(self.kv, seq, tag=tag)
                check_content(self.kv, seq, prompt, tag)
                self.erased.discard(tenant)

    @rule(tenant=st.sampled_from(TENANTS))
    def forget_tenant(self, tenant: str) -> None:
        self.kv.forget(tenant=tenant)
        self.erased.add(tenant)

    @rule()
    def restart(self) -> None:
        known = {block.key for block in self.kv.planner.store.index}
        self.kv.close()
        self.kv = self.start()
        assert {block.key for block in self.kv.planner.store.index} <= known

    @rule()
    def kill(self) -> None:
        """Whatever lies on the disk now is what the next process finds."""
        other = self.home / str(len(self.abandoned) + 1)
        shutil.copytree(self.directory, other)
        self.abandoned.append(self.kv)
        self.directory = other
        self.kv = self.start()

    @rule(byte=st.integers(0, 1 << 20), bit=st.integers(0, 7))
    def damage(self, byte: int, bit: int) -> None:
        self.kv.close()
        files = sorted(file for file in self.directory.glob("slab-*") if file.stat().st_size)
        for file in files[:1]:
            data = bytearray(file.read_bytes())
            data[byte % len(data)] ^= 1 << bit
            file.write_bytes(data)
        self.kv = self.start()

    @rule()
    def flush(self) -> None:
        assert self.kv.flush(60)

    @invariant()
    def adds_up(self) -> None:
        audit(self.kv)

    def teardown(self) -> None:
        for kv in (*self.abandoned, self.kv):
            kv.close()
        shutil.rmtree(self.home)


def test_any_order_of_restarts() -> None:
    run_state_machine_as_test(Restarts, settings=settings(max_examples=10, stateful_step_count=20))


@pytest.mark.deep
def test_any_order_of_restarts_at_length() -> None:
    run_state_machine_as_test(Restarts, settings=settings(max_examples=400, stateful_step_count=60))
