"""Every metric has a line in the table, the table has no other, and the documentation shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowkv.observe.metrics import NAMES, RULES, markdown, meaning

ROOT = Path(__file__).resolve().parents[2]
READ = {  # told by nobody: `runtime.levels` reads them, and is held against the table in its test
    name for name in NAMES if name.startswith(("tier_", "device_", "prefetch_"))
} | {"audit_mismatches_total", "audit_skipped_total", "audit_worst", "known_pages"}
READ |= {"open_sequences", "tokens_seen_total", "tokens_reused_total"}


def counted() -> dict[str, tuple[str, tuple[str, ...]]]:
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for rule in RULES.values():
        kinds = {rule.number: "counter", **dict.fromkeys(rule.sums.values(), "counter")}
        kinds |= dict.fromkeys(rule.spreads.values(), "histogram")
        kinds |= dict.fromkeys(rule.levels.values(), "gauge")
        for name, kind in kinds.items():
            assert found.setdefault(name, (kind, rule.labels)) == (kind, rule.labels), name
    return found


def test_the_table_is_what_is_counted() -> None:
    assert {name: (kind, labels) for name, (kind, labels, _) in NAMES.items()} == {
        **counted(),
        **{name: NAMES[name][:2] for name in READ},
    }
    assert not READ & set(counted())


def test_names_without_total_differ() -> None:
    assert len({name.removesuffix("_total") for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_names_follow_the_rules_of_prometheus(name: str) -> None:
    kind, labels, said = NAMES[name]
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    assert name.endswith("_total") == (kind == "counter")
    counts = name in ("step_rows", "step_context_tokens")
    assert (name.endswith("_seconds") or counts) == (kind == "histogram")
    assert all(re.fullmatch("[a-z]+", label) for label in labels) and "le" not in labels
    assert said and said == said.strip() and "\n" not in said and "\\" not in said
    assert meaning(name) == said


def test_the_documentation_has_the_same_table() -> None:
    page = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    (shown,) = re.findall(r"(\| name \| kind .*?\n)\n", page + "\n", re.DOTALL)
    assert shown == markdown(), (
        "python -c 'from flowkv.observe.metrics import *; print(markdown())'"
    )


def test_what_is_counted_is_a_field_of_its_event() -> None:
    for kind, rule in RULES.items():
        fields = {*rule.labels, *rule.sums, *rule.spreads, *rule.levels}
        assert fields <= set(kind.__struct_fields__), kind
        assert set(rule.maybe) <= set(rule.spreads)
