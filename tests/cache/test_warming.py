"""A pool that fills before its policy is compiled: no call waits, and what is given up is LRU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowkv.policy import HazardIndex
from tests.inside import _COMPILED, LeafOrder

from . import toy

PAGE = toy.PAGE
CALLS = ("access", "insert", "remove", "evict", "pin", "unpin", "displace", "wanted", "expired")


class Compiler:
    """Stands in for the one that takes for ever; any call of a policy would wait for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.done = False
        patch.setattr(_COMPILED, "loaded", lambda name: self.done)
        patch.setattr(_COMPILED, "ready", lambda name: self.asked.append(name) or self.done)
        for kind in (LeafOrder, HazardIndex):
            for name in CALLS:
                if name in vars(kind):
                    patch.setattr(kind, name, self._guarded(vars(kind)[name]))

    def _guarded(self, call: Any) -> Any:
        def guarded(*given: Any, **named: Any) -> Any:
            assert self.done, "a call waited for a compiler"
            return call(*given, **named)

        return guarded


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def known(kv: Any, prompt: list[int]) -> int:
    """Pages of a prompt that are here."""
    with kv.open(prompt) as seq:
        return int(seq.length // PAGE)


def test_a_pool_that_fills_waits_for_no_compiler(compiler: Compiler) -> None:
    prompts = [[seed] * (3 * PAGE + 1) for seed in range(9)]
    with toy.make_kv(toy.simple(), pages=16, policy="hazard") as kv:
        for n, prompt in enumerate(prompts):
            with toy.opened(kv, prompt) as seq:
                toy.check_content(kv, seq, prompt)
            if n:  # one that is asked again and again stays
                toy.published(kv, prompts[0])
        assert set(compiler.asked) == {"hazard"}
        assert [known(kv, prompt) for prompt in prompts][:2] == [3, 0]
        assert known(kv, prompts[8]) == 3
        for prompt in prompts:
            with toy.opened(kv, prompt) as seq:
                toy.check_content(kv, seq, prompt)
        (policy,) = [place.policy for place in kv.planner.store.places]
        assert policy.plain and policy.policy.digest() == HazardIndex().digest()
        compiler.done = True
        here = sorted(policy.resident())
        with kv.open([99] * PAGE):
            assert not policy.plain and sorted(policy.policy.resident()) == here
        for prompt in prompts:
            with toy.opened(kv, prompt) as seq:
                toy.check_content(kv, seq, prompt)
        assert policy.policy.digest() != HazardIndex().digest(), "it chose what left since then"


def test_one_prompt_that_fills_the_pool_waits_for_none(compiler: Compiler) -> None:
    with toy.make_kv(toy.simple(), pages=16, policy="auto") as kv:
        for seed in range(3):
            prompt = [seed] * (13 * PAGE + 1)
            with toy.opened(kv, prompt) as seq:
                toy.check_content(kv, seq, prompt)
        assert [one["chosen"] for one in kv.stats()["policies"].values()] == [
            "lru"
        ] and compiler.asked


def test_no_tier_waits_for_one(compiler: Compiler, tmp_path: Path) -> None:
    """Nor storing, loading, hints, leases, quotas, and the end."""
    options = {"tiers": ["host:64KiB", f"disk:{tmp_path / 'kv'}:8MiB"], "policy": "auto"}
    with toy.make_kv(toy.simple(), pages=16, quotas={"a": "4KiB:32KiB"}, **options) as kv:
        for seed in range(12):
            prompt = [seed] * (4 * PAGE + 1)
            with toy.opened(kv, prompt, tenant="a" if seed % 2 else "b", lease="one_shot") as seq:
                toy.check_content(kv, seq, prompt)
            kv.flush()
        toy.published(kv, [0] * (4 * PAGE + 1), tenant="b")
        assert compiler.asked
    compiler.done = True
    with toy.make_kv(toy.simple(), pages=16, **options) as kv:
        toy.published(kv, [0] * (4 * PAGE + 1))
        assert not any(hasattr(place.policy, "plain") for place in kv.planner.store.places)
