"""Every metric has a line in the table, the table has no other, and the documentation shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.inside import NAMES, RULES

ROOT = Path(__file__).resolve().parents[2]
READ = {  # told by nobody: `runtime.levels` reads them, and is held against the table in its test
    name for name in NAMES if name.startswith(("tier_", "device_", "prefetch_"))
} | {"audit_mismatches_total", "audit_skipped_total", "audit_worst", "known_pages"}
READ |= {"open_sequences", "tokens_seen_total", "tokens_reused_total"}


def test_the_table_is_what_is_counted() -> None:
    counted = {name for rule in RULES.values() for name in rule}
    assert counted == set(NAMES) - READ


def test_names_without_total_differ() -> None:
    assert len({name.removesuffix("_total") for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_names_follow_the_rules_of_prometheus(name: str) -> None:
    kind, labels, said, *_ = NAMES[name]
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
    assert name.endswith("_total") == (kind == "counter")
    counts = name in ("step_rows", "step_context_tokens")
    assert (name.endswith("_seconds") or counts) == (kind == "histogram")
    assert all(re.fullmatch("[a-z]+", label) for label in labels) and "le" not in labels
    assert said and said == said.strip() and "\n" not in said and "\\" not in said


def markdown(kind: str) -> str:
    """Return the table of one kind of names, as the documentation has it."""
    rows = ["| name | meaning |", "|---|---|"]
    for name, one in NAMES.items():
        if one.kind == kind:
            labels = "{" + ", ".join(one.labels) + "}" if one.labels else ""
            rows.append(f"| `flowkv_{name}{labels}` | {one.meaning} |")
    return "\n".join(rows) + "\n"


def test_the_documentation_has_the_same_tables() -> None:
    page = (ROOT / "docs" / "guides" / "metrics.md").read_text()
    kinds = dict.fromkeys(one.kind for one in NAMES.values())
    shown = dict(re.findall(r"^## (\w+)s\n\n((?:\|.*\n)+)", page, re.MULTILINE))
    assert {kind.lower() for kind in shown} == set(kinds)
    for kind in kinds:
        assert shown[kind.capitalize()] == markdown(kind), f"it should be\n{markdown(kind)}"


def test_what_is_counted_is_a_field_of_its_event() -> None:
    for kind, rule in RULES.items():
        assert len({metric.labels for metric in rule.values()}) == 1, "one key for all of them"
        assert [m.kind for m in rule.values() if not m.field] == ["counter"], "how often it came"
        fields = {field for m in rule.values() for field in (*m.labels, m.field) if field}
        assert fields <= set(kind.__struct_fields__), kind
        timed = {name for name, m in rule.items() if m.field.endswith("_s") or m.field == "seconds"}
        spread = {name for name, metric in rule.items() if metric.kind == "histogram"}
        assert timed == {name for name in spread if name.endswith("_seconds")}
        assert {name for name, metric in rule.items() if metric.maybe} <= spread
