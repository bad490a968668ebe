"""After a restart: what is kept is worth what was said of it."""

from __future__ import annotations

from bench.policy.restarts import STOPS, measure_restarts
from flowkv.sim import generate


def test_a_directory_is_as_good_as_no_restart_and_nothing_is_worse() -> None:
    trace = generate("agents", seed=1, requests=1200)
    found = measure_restarts(trace)
    assert [one.request for one in found] == [int(share * len(trace)) for share in STOPS]
    for one in found:
        assert one.kept_s == 0
        assert one.first_kept >= 0.9 > one.first_empty
        assert one.empty_s > 0
