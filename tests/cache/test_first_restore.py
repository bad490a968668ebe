"""The first restore of a process: rates of earlier ones, one page to try, a link to look at."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from flowkv import KV
from flowkv.policy.restore import EarlierRates
from tests.cache.toy import make_kv, published, simple
from tests.inside import ConfigError, LoadGate, stack

from . import toy
from .links import Link, evict, forward

PAGE = toy.PAGE
PROMPT = [(n * n * 7 + 3) % 50 for n in range(30 * PAGE + 3)]


def stored(link: Link, *, token_s: float = 0.0) -> KV:
    """A cache that measured nothing; an earlier one may have measured what computing takes."""
    kv = make_kv(toy.simple(layers=3), tiers=[link], load_deadline_s=20.0)
    link.per_poll = 100
    published(kv, PROMPT)
    evict(kv)
    kv.gate.rates.pop("link", None)
    kv.gate.earlier = EarlierRates(computes={kv.gate.model: token_s} if token_s else {})
    return kv


def fronts(kv: KV, most: int = 100, took: Callable[[int], None] = lambda _: None) -> list[int]:
    """Tokens of each forward that is run over the front; `took` is called behind each."""
    found = []
    with kv.open(PROMPT, wait=False) as seq:
        job = seq.restoration
        assert job is not None
        while (tokens := job.next()) and len(found) < most:
            found.append(tokens)
            with kv.step([seq], [seq.tokens[seq.length : seq.length + tokens]]) as step:
                forward(step)
            took(tokens)
        job.finish(ok=False)
    return found


def test_where_nothing_is_known_one_page_is_tried() -> None:
    link = Link()
    with stored(link) as kv:
        link.per_poll = 0
        assert fronts(kv, 1) == [PAGE]


def test_what_earlier_processes_measured_spares_that() -> None:
    link = Link()
    with stored(link, token_s=1.0) as kv:
        assert fronts(kv) == []


def test_a_rate_that_is_wrong_costs_no_more_than_a_page() -> None:
    link = Link()
    with stored(link, token_s=1e-9) as kv:  # slower by far than it says: all would be computed
        link.per_poll = 0
        assert fronts(kv, 1) == [PAGE]


@pytest.mark.parametrize("stall_s", [0.0, 0.5])
def test_a_link_that_shows_nothing_is_not_waited_for_alone(
    stall_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where the machine stands still between a prompt and its first loads."""
    now_s, link = [1000.0], Link()

    def passes(seconds: float) -> None:
        now_s[0] += seconds

    with stored(link, token_s=1e-3) as kv:  # by which 1 GB/s is worth waiting for
        link.per_poll = 0
        kv.restores.costs.computed = lambda *_: None  # type: ignore[method-assign]
        clock = SimpleNamespace(perf_counter=lambda: now_s[0])
        monkeypatch.setattr("flowkv.cache.restore.time", clock)
        monkeypatch.setattr("flowkv.cache.restore.rest", lambda _, seconds: passes(seconds))
        own, stalls = kv.restores.pump, [stall_s]

        def pump() -> None:
            passes(stalls.pop() if stalls else 0.0)
            own()

        monkeypatch.setattr(kv.restores, "pump", pump)
        found = fronts(kv, took=lambda tokens: passes(tokens * 1e-3))
    assert found[0] == PAGE and sum(found) >= 15 * PAGE


def test_a_link_that_answered_is_believed() -> None:
    link = Link()
    with stored(link, token_s=1.0) as kv:
        assert fronts(kv) == []
        assert kv.gate.rates["link"].samples
        link.per_poll = 0  # it hangs from now on: loads have their deadline
        evict(kv)
        assert fronts(kv) == []


# ---- kept with the store


def disk_kv(directory: Path, **options: Any) -> KV:
    return make_kv(simple(), pages=16, disk=f"{directory}:64MiB", **options)


def test_rates_are_kept_with_the_store(tmp_path: Path) -> None:
    with disk_kv(tmp_path / "kv") as kv:
        kv.gate.loaded("disk", 10**6, 0.5)
        kv.gate.computed(100, 2.0)
        name = kv.gate.model
    file = tmp_path / "kv" / "learned"
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_size < 300
    for _ in range(2):  # nothing is measured again, and nothing forgotten
        with disk_kv(tmp_path / "kv") as kv:
            assert kv.gate.model == name and not any(r.samples for r in kv.gate.rates.values())
            assert kv.gate.earlier == EarlierRates({"disk": (0.0, 2e6)}, {name: 0.02})
            assert kv.gate.worth({"disk": 10**9}, 1)  # nothing is refused by it
    with disk_kv(tmp_path / "kv") as kv:
        kv.gate.computed(100, 1.0)
    with disk_kv(tmp_path / "kv") as kv:
        assert kv.gate.earlier.computes == {name: 0.01}


def test_another_model_has_another_rate(tmp_path: Path) -> None:
    names = []
    for namespace in ("a", "b", "a"):
        with disk_kv(tmp_path / "kv", namespace=namespace) as kv:
            names.append(kv.gate.model)
            kv.gate.computed(1, 1.0 + len(names))
    assert names[0] == names[2] != names[1]
    with disk_kv(tmp_path / "kv") as kv:
        assert kv.gate.earlier.computes == {names[1]: 3.0, names[0]: 4.0}


def written(directory: Path, rates: object) -> None:
    body = msgspec.msgpack.encode({"version": 1, "models": {}, "rates": rates})
    (directory / "learned").write_bytes(xxhash.xxh3_128_digest(body) + body)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, 1e-300])
def test_rates_that_make_no_sense_are_ignored(tmp_path: Path, wrong: float) -> None:
    rates = {
        "links": {"a": (0.0, wrong), "b": (wrong or math.nan, 1e9), "c": (0.5, 1e9)},
        "computes": {"a": wrong, "b": 0.25},
    }
    written(tmp_path, rates)
    gate = LoadGate()
    stack.load(tmp_path, [], gate)
    links = dict(gate.earlier.links)
    links.pop("b", None)  # a latency of nearly nothing is one
    assert links == {"c": (0.5, 1e9)} and gate.earlier.computes == {"b": 0.25}


def test_only_a_few_are_kept(tmp_path: Path) -> None:
    names = [str(n) for n in range(1000)]
    written(tmp_path, {"links": dict.fromkeys(names, (0, 1)), "computes": dict.fromkeys(names, 1)})
    gate = LoadGate()
    gate.model = "mine"
    stack.load(tmp_path, [], gate)
    gate.computed(1, 1.0)
    stack.save(tmp_path, [], gate)
    found = LoadGate()
    stack.load(tmp_path, [], found)
    assert len(found.earlier.links) == len(found.earlier.computes) == 64
    assert "mine" in found.earlier.computes


@pytest.mark.parametrize(
    "rates", [[], {"links": 3}, {"links": {"a": 1.0}}, {"computes": {"a": "fast"}}, {"more": {}}]
)
def test_rates_of_another_form_are_refused(tmp_path: Path, rates: object) -> None:
    written(tmp_path, rates)
    with pytest.raises(ConfigError, match="Delete it"):
        stack.load(tmp_path, [], LoadGate())
