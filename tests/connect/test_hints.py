"""Hints of requests, as engines hand them on: what they mean, and that nothing in them raises."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv import Retain
from tests.inside import Retention, hint_of

NOW = 1_700_000_000.0


def action(payload: Any, kind: str = "kv.retain", version: str = "1.0") -> Any:
    said = {"action_id": "a", "action_type": kind, "action_version": version}
    return {**said, "payload": payload}


def envelope(*actions: Any) -> Any:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def own(value: Any) -> Retention:
    return hint_of({"flowkv": value}, None, NOW)


def asked(payload: Any, **more: Any) -> Retention:
    return hint_of(None, envelope(action(payload, **more)), NOW)


@pytest.mark.parametrize(
    ("value", "spans"),
    [
        ({"priority": 60}, [Retain(0, None, 60)]),
        ({"priority": 0}, [Retain(0, None, 0)]),
        ({"ttl": "5m"}, [Retain(0, None, 80, 300.0)]),
        ({"ttl": "1h", "stop": 96}, [Retain(0, 96, 80, 3600.0)]),
        ({"ttl": 2.5}, [Retain(0, None, 80, 2.5)]),
        ({"ttl": None}, [Retain(0, None, 80, math.inf)]),
        ({"until": NOW + 90}, [Retain(0, None, 80, 90.0)]),
        ({"type": "ephemeral"}, [Retain(0, None, 80, 300.0)]),
        ({"type": "ephemeral", "ttl": None, "until": None}, [Retain(0, None, 80, 300.0)]),
        ({"priority": None, "stop": None}, [Retain(0, None, 80)]),
        ({"type": "ephemeral", "ttl": "1h"}, [Retain(0, None, 80, 3600.0)]),
        (
            [{"stop": 32, "ttl": "1h"}, {"start": 32, "stop": 64, "priority": 50}],
            [Retain(0, 32, 80, 3600.0), Retain(32, 64, 50)],
        ),
        ([], []),
        (None, []),
    ],
)
def test_flowkvs_own_form(value: Any, spans: list[Retain]) -> None:
    assert own(value) == Retention(tuple(spans))


@pytest.mark.parametrize(
    ("payload", "spans"),
    [
        (
            {"scope": "ann", "directives": [{"start": 0, "end": 32, "priority": 100}]},
            [Retain(0, 32, 100)],
        ),
        (
            {
                "directives": [
                    {"start": 0, "end": 32, "priority": 1, "duration": 60.0},
                    {"start": 32, "end": None, "priority": 0, "duration": None},
                ]
            },
            [Retain(0, 32, 36, 60.0), Retain(32, None, 35)],
        ),
        (
            {
                "priority": 50,
                "ttl_seconds": 2.5,
                "execute_at": "request_completion",
                "include_current_request": True,
                "block_hashes": ["11", "12"],
            },
            [Retain(0, None, 68, 2.5)],
        ),
        ({"directives": []}, []),
    ],
)
def test_actions_of_kv_hints(payload: Any, spans: list[Retain]) -> None:
    """Their least priority protects, as in vLLM's own rule: it lies above the default."""
    assert asked(payload) == Retention(tuple(spans))


def test_what_others_implement_is_no_mistake() -> None:
    assert hint_of(None, envelope(action({"keys": [1]}, kind="kv.fetch"))) == Retention()
    assert hint_of({"flowkv_tenant": "ann", "kv_load_tiers": []}) == Retention()
    assert hint_of(None) == Retention()


@pytest.mark.parametrize(
    "value",
    [
        *({"priority": 101}, {"priority": -1}, {"priority": True}, {"priority": "80"}),
        *({"priority": math.nan}, {"prio": 80}, {"ttl": "6m"}, {"ttl": 0}, {"ttl": math.nan}),
        *({"ttl": True}, {"ttl": 10**400}, {"until": NOW - 1}, {"until": "tomorrow"}),
        *({"start": -1}, {"start": 8, "stop": 8}, {"stop": "all"}, {"type": "persistent"}, "1h"),
        *(7, [[]]),
    ],
)
def test_a_bad_span_costs_only_itself(value: Any) -> None:
    good = {"priority": 60}
    hint = own([*(value if isinstance(value, list) else [value]), good])
    assert hint.spans == (Retain(0, None, 60),)
    assert hint.dropped == 1
    assert hint.problem


@pytest.mark.parametrize(
    "directive",
    [
        *({"start": 0, "end": 16}, {"start": 0, "end": 16, "priority": 101}),
        *({"start": 16, "end": 16, "priority": 1}, {"priority": 1, "stop": 9}),
        *({"priority": 1, "duration": -1}, "all", None),
    ],
)
def test_a_bad_directive_costs_its_action(directive: Any) -> None:
    good = {"directives": [{"priority": 100}]}
    bad = {"directives": [{"priority": 1}, directive]}
    hint = hint_of(None, envelope(action(bad), action(good)), NOW)
    assert (hint.spans, hint.dropped) == ((Retain(0, None, 100),), 1)


def test_directives_for_answers_select_nothing() -> None:
    told = {"directives": [{"covers_output": True, "priority": 9}, {"end": 8, "priority": 100}]}
    assert asked(told) == Retention((Retain(0, 8, 100),))


def test_actions_that_cannot_be_followed_are_counted() -> None:
    assert asked({"directives": [{"priority": 9}]}, version="2.0").dropped == 1
    others = {"priority": 9, "ttl_seconds": 9, "block_hashes": ["1"]}
    assert asked({**others, "include_current_request": False}).dropped == 1
    assert asked(others).spans == ()
    for message in ("now", 7, [], {}, {"actions": None}, {"actions": [None, {}]}):
        hint = hint_of({"flowkv": {"priority": 60}, "kv_hint": message})
        assert hint.spans == (Retain(0, None, 60),)


def test_a_message_comes_as_an_argument_or_among_the_parameters() -> None:
    """Dynamo's bridge to vLLM passes it as "kv_hint"."""
    message = envelope(action({"directives": [{"priority": 100}]}))
    assert hint_of({"kv_hint": message}) == hint_of(None, message) != Retention()


def test_the_number_of_spans_is_bounded() -> None:
    many = range(100_000)
    hint = own([{"start": n, "stop": n + 1} for n in many])
    assert (len(hint.spans), hint.dropped) == (128, 1)
    one = {"directives": [{"start": n, "priority": 1} for n in many]}
    hint = hint_of(None, envelope(*[action(one)] * 200))
    assert len(hint.spans) == 128


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "start stop end priority ttl until type duration directives block_hashes".split()
            )
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(_json, _json, _json)
def test_nothing_that_a_client_sends_raises(params: Any, value: Any, payload: Any) -> None:
    said = {"flowkv": value, "kv_hint": payload}
    for hint in (hint_of(params), hint_of(said, envelope(action(payload), value), NOW)):
        assert all(0 <= span.priority <= 100 and span.for_s > 0 for span in hint.spans)
        assert bool(hint.problem) == bool(hint.dropped)


@pytest.mark.parametrize(
    "value", [{"start": 10**5000}, {"until": 10**5000}, {"x" * 10**6: 1}, {"ttl": "x" * 10**6}]
)
def test_what_cannot_be_printed_or_is_long_is_reported_in_short(value: Any) -> None:
    found = own(value)
    assert (found.dropped or found.spans) and len(found.problem) <= 300
    assert hint_of({"kv_hint": envelope(action(value))}).dropped == 1
