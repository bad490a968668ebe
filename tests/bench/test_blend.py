"""`python -m bench blend` on the fixture: its cases are what they say, its table compares them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import flowkv
from bench import blend
from tests.fixture_model import load_tiny
from tests.inside import door_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_prompt_is_scored_by_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend, "LEAST", 120)
    monkeypatch.setattr(blend, "MOST", 150)
    few = {name: blend.RULES[name] for name in ("nothing", "first:16", "values:0.3", "random:0.15")}
    monkeypatch.setattr(blend, "RULES", few)
    loaded = SimpleNamespace(encode=lambda text: list(text.encode()))
    (case,) = blend.cases(loaded, 1)
    text = bytes(case.prompt)
    for document in case.documents:
        assert bytes(document) in text
    ids, first = case.questions["boundary"]
    assert bytes(ids[:first]).endswith(bytes(case.documents[2][-16:]))
    assert ids[first:] == case.documents[3][:32]
    asked, first = case.questions["fact"]
    assert b"The access code of the " in bytes(asked[:first])
    assert bytes(asked[first:]).strip() in text
    model = load_tiny()
    with pytest.warns(flowkv.ExperimentalWarning):
        kv = flowkv.attach(model, gpu="64MiB", page_size=16, reuse="blend")
    with kv:
        door = door_of(model)
        blender = door.blending.now()
        kv.learn(case.documents)
        read = [dict(blend.scores(blender, case))] * 2
        speed = [dict(blend.paces(blender, case))]
    table = {row["rule"]: row for row in blend.rows(read, speed)}
    assert list(table) == ["whole", *blend.RULES]
    assert table["whole"]["same token"] == "1.000"
    assert table["nothing"]["KL closed"] == "0 % [0, 0]"
    for question in blend.QUESTIONS:
        assert read[0]["whole", question].kl == pytest.approx(0, abs=1e-6)
        assert read[0]["nothing", question].kl > 1e-6
