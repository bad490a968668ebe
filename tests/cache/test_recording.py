"""A live cache and the simulator: the same calls give the same decisions, and the same hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowkv import KV, NEVER, Retain
from flowkv.policy import make_policy
from flowkv.sim import replay
from tests.cache.audit import audit
from tests.cache.toy import PAGE, advance, geometry, make_kv, prefill, published, simple
from tests.inside import ByScore, ConfigError, HostTier, ManualClock, Reader
from tests.policy.call_log import CallLog, logged_by, repeat


def live(tmp_path: Path, policy: str) -> tuple[list[CallLog], int]:
    """A day in the life of a cache of three places, and of the one that opens its disk again."""
    logs: list[CallLog] = []
    random, clock, evictions = np.random.default_rng(7), ManualClock(), 0
    for write_back in (False, True):
        tiers = [HostTier(30 * 5300), f"disk:{tmp_path}:2MiB"]
        made = logged_by(logs, lambda: make_policy(policy))
        more = {"policy": made, "clock": clock, "write_back": write_back}
        kv = make_kv(geometry(), pages=24, tiers=tiers, **more)
        for turn in range(80):
            converse(kv, random, clock, turn)
        audit(kv)
        kv.close()
        evictions += sum(n for name, n in kv.metrics.snapshot().items() if "evictions" in name)
    return logs, evictions


def converse(kv: KV, random: np.random.Generator, clock: ManualClock, turn: int) -> None:
    clock.advance(s=float(random.exponential(9.0)))
    session = int(random.integers(8))
    prompt = [session // 4] * 16 + [session] * int(random.integers(1, 40))
    more: dict[str, Any] = {"session": session}
    if turn % 7 == 0:
        more |= {"lease": "one_shot", "retain": [Retain(0, 16, priority=80, for_s=60.0)]}
    waiting = kv.enqueue(prompt) if turn % 5 == 0 else None
    with prefill(kv, kv.open(prompt, **more)) as seq:
        for token in range(int(random.integers(0, 5))):
            clock.advance(s=0.1)
            advance(kv, [seq], [[token]])
        seq.close("turn_end" if turn % 3 else "tool_use")
    if turn % 11 == 0:
        kv.hint(session, NEVER if turn % 2 else 20.0)
    if turn % 25 == 24:
        kv.forget([session // 4] * 16 + [session] * 8)
    assert waiting is None or not waiting.waiting


@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "hazard", "auto"])
def test_the_same_calls_give_the_same_decisions_in_the_simulator(
    tmp_path: Path, policy: str
) -> None:
    logs, evictions = live(tmp_path / "kv", policy)
    assert len(logs) == 6 and evictions > 50
    for log in logs:
        fresh = make_policy(policy)
        assert repeat(log.calls, fresh) == log.calls
        assert fresh.digest() == log.digest()
        assert sorted(fresh.resident()) == sorted(log.resident())
    names = {call.name for log in logs for call in log.calls}
    assert names >= {"insert", "access", "complete", "evict", "pin", "unpin", "hint", "enqueue"}
    assert names >= {"remove", "forget", "expired", "admit"}
    assert len({log.digest() for log in logs}) > 1


def test_a_call_left_out_changes_the_decisions(tmp_path: Path) -> None:
    logs, _ = live(tmp_path / "kv", "lru")
    device = logs[0]
    calls = [call for call in device.calls if call.name != "access"]
    assert repeat(calls, make_policy("lru")) != calls


class Paying(ByScore):
    """The first tenant's pages go first, then the seldom used."""

    name = "paying"

    def score(self, now_ns: int, use: Any) -> Any:
        return use.uses + 99.0 * (use.visit.tenant == 1)


@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "arc", "hazard", "auto", Paying])
def test_a_recording_gives_the_hits_that_were_measured(tmp_path: Path, policy: Any) -> None:
    """Prompts end behind a page, so that the token that must run fills the one open page."""
    random, clock, pages = np.random.default_rng(3), ManualClock(), 30
    kv = make_kv(simple(), pages=pages, policy=policy, clock=clock, record=str(tmp_path / "trace"))
    capacity = kv.planner.store.pools["cpu"].capacity_granules - 1
    talks = [[n % 3] * 16 for n in range(6)]
    hits = []
    for _ in range(300):
        clock.advance(s=float(random.exponential(5.0)))
        n = int(random.integers(6))
        talks[n] += random.integers(0, 3, PAGE).tolist()
        if len(talks[n]) > 12 * PAGE:
            talks[n] = [n % 3] * 16
        with kv.open([*talks[n], 9], session=n, tenant=str(n % 2)) as seq:
            hits.append(seq.reused // PAGE)
            prefill(kv, seq, chunk=1 << 10)
    kv.close()
    trace = Reader(tmp_path / "trace").trace()
    assert len(trace) == 300 and trace.block_tokens == PAGE
    assert trace.blocks.shape[0] == trace.offsets[-1] == np.diff(trace.offsets).sum()
    assert replay(trace, policy, pages=capacity, held=True).hits.tolist() == hits
    # Only LRU never declines to keep what was just computed.
    plain = replay(trace, policy, pages=capacity).hits.tolist()
    assert (plain == hits) is (policy == "lru")
    assert 0.2 < sum(hits) / len(trace.blocks) < 0.9
    assert len(set(trace.sessions.tolist())) == 6 and (trace.input_tokens % PAGE == 1).all()


def test_a_recording_holds_no_key_no_token_and_no_name(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    kv = make_kv(simple(), pages=16)
    with kv.record(path) as recording:
        published(kv, [77] * 25, tenant="alice", session="secret-session")
        published(kv, [77] * 25, tenant="bob")
        kv.forget(tenant="alice")
        assert recording.requests == 2
    recording.close()
    published(kv, [5] * 25)
    kv.close()
    first, second = Reader(path)
    with make_kv(simple(), pages=16) as other, other._probe([77] * 25, "alice", ()) as seq:
        raw = path.read_bytes() + first.ids + second.ids
        assert all(seq.key(0, page)[:16] not in raw for page in range(3))
    assert b"alice" not in raw and b"secret" not in raw and first.ids != second.ids
    assert (first.tenant, second.tenant, second.session) == (0, 1, -1) and first.session >= 0
    assert first.input_tokens == 25 and len(Reader(path).trace()) == 2


def test_forks_and_what_was_not_served_are_not_recorded(tmp_path: Path) -> None:
    kv = make_kv(simple(), pages=16)
    with kv.record(tmp_path / "trace") as recording:
        seq = prefill(kv, kv.open([1] * 9))
        kv.fork(seq).close()
        kv.enqueue([1] * 9).cancel()
        kv.warm([1] * 9)
        assert recording.requests == 0
        seq.close()
        assert recording.requests == 1 and "1 requests" in repr(recording)
        assert len(recording._writer._known) == 1
    assert not recording._writer._known, "a closed one keeps no ids"


def test_a_recording_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        make_kv(simple(), record=str(tmp_path / "nowhere" / "trace"))
    kv = make_kv(simple(), pages=16)
    recording = kv.record(tmp_path / "trace")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    recording._writer.request = fail
    with pytest.warns(UserWarning, match="ends here"):
        published(kv, [1] * 25)
    published(kv, [2] * 25)
    assert recording.requests == 0 and kv.explain([1] * 25).known == 24
