"""Load or recompute."""

from __future__ import annotations

import pytest

from flowkv.policy.restore import LoadGate


def test_the_gate_weighs_measured_rates() -> None:
    gate = LoadGate()
    assert gate.worth({"disk": 1 << 30}, 1)
    gate.computed(100, 1.0)
    assert gate.worth({"disk": 1 << 30}, 1), "the first load measures"
    gate.loaded("disk", 1000, 1.0)
    assert gate.load_s({"disk": 500, "host": 500}) == pytest.approx(0.5)
    assert gate.worth({"disk": 1000}, 101) and not gate.worth({"disk": 1000}, 50)
    gate.loaded("disk", 0, 9.0)
    gate.computed(0, 9.0)
    assert gate.worth({"disk": 1000}, 101)


def test_refusals_are_not_for_ever() -> None:
    gate = LoadGate()
    gate.computed(1000, 1.0)
    gate.loaded("disk", 1000, 100.0)
    refused = 0
    while not gate.worth({"disk": 1000}, 1000):
        refused += 1
    assert 50 < refused < 150, "a hundred times too slow is tried about once in ninety requests"
    gate.loaded("disk", 1000, 0.1)
    gate.loaded("disk", 1000, 0.1)
    assert gate.worth({"disk": 1000}, 1000)
