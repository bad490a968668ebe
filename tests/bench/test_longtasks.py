"""`python -m bench longtasks`: prompts hold their answers, and what is lost shows in all tables."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import longtasks
from bench.longtasks import EXACT, MATCHED, RANKED, Coded, Prompt, Reader
from tests.fixture_model import load_tiny


def encode(text: str) -> list[int]:
    return list(text.encode())


def loaded() -> Any:
    return SimpleNamespace(model=load_tiny(), encode=encode)


@pytest.mark.parametrize("task", [*MATCHED, *RANKED])
def test_a_context_holds_all_answers_and_only_right_ones_are_right(task: str) -> None:
    make = {**MATCHED, **RANKED}[task]
    for number in range(5):
        asked = make(random.Random(f"{task} {number}"), 40)
        assert all(one.strip() in asked.context for one in asked.right + asked.wrong)
        assert asked.right
        assert not {*asked.right} & {*asked.wrong}
        assert bool(asked.wrong) == (task in RANKED)
        again = make(random.Random(f"{task} {number}"), 40)
        assert again == asked, "prompts are those of their seeds"


@pytest.mark.parametrize("task", ["common words", "frequent words"])
def test_right_words_are_the_most_frequent_ones(task: str) -> None:
    asked = RANKED[task](random.Random(5), 60)
    counts = [[asked.context.count(one.strip()) for one in some] for some in asked[2:]]
    assert min(counts[0]) > max(counts[1])


def test_prompts_fill_the_length_that_is_asked_for() -> None:
    for task, make in {**MATCHED, **RANKED}.items():
        prompt = longtasks.fitted(encode, make, "a", 4000)
        assert 3000 < len(prompt.context) <= 4000, task


class _Said(Reader):
    """A reader whose model says what it is told to."""

    def __init__(self, wanted: str) -> None:
        self.wanted = encode(wanted)

    def read(self, state: Any, ids: torch.Tensor) -> torch.Tensor:
        state.append(ids)
        return self._logits(sum(map(len, state)) - len(ids), len(ids))

    def tried(self, state: Any, ids: torch.Tensor) -> torch.Tensor:
        return self._logits(sum(map(len, state)), len(ids))

    def _logits(self, at: int, count: int) -> torch.Tensor:
        logits = torch.zeros(count, 256)
        for n in range(count):
            if 3 <= at + n < 3 + len(self.wanted):
                logits[n, self.wanted[at + n - 3]] = 9.0
        return logits


@pytest.mark.parametrize(
    ("right", "wrong", "score"),
    [
        *(([" 12"], [], 1.0), ([" 13"], [], 0.0), ([" 12"], [" 13", " 99"], 1.0)),
        *(([" 13"], [" 12", " 99"], 0.5), ([" 99", " 12"], [" 13"], 0.5)),
    ],
)
def test_answers_are_scored_by_what_the_model_says(
    right: list[str], wrong: list[str], score: float
) -> None:
    some = [[torch.tensor(encode(one)) for one in part] for part in (right, wrong)]
    prompt = Prompt(torch.tensor([0]), torch.tensor([1, 2, 3, 4]), *some)
    assert longtasks.answered(_Said(" 12"), [], prompt) == score


@pytest.mark.parametrize(("said", "score"), [(": 12", 1.0), ("as: 12", 1.0), (" = say 12", 0.0)])
def test_a_number_is_right_behind_a_few_other_tokens(said: str, score: float) -> None:
    some = [torch.tensor(encode(" 12"))]
    prompt = Prompt(torch.tensor([0]), torch.tensor([1, 2, 3, 4]), some, [])
    assert longtasks.answered(_Said(said), [], prompt) == score


class _Lost(Coded):
    """A way that loses all pages, which every table has to show."""

    def _page(self, k: torch.Tensor, v: torch.Tensor, codec: str) -> tuple[torch.Tensor, ...]:
        if codec == "lost":
            return torch.zeros_like(k), torch.zeros_like(v)
        return super()._page(k, v, codec)


def test_losing_more_diverges_more_in_all_ways_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(longtasks.__file__).read_text()
    monkeypatch.setattr(longtasks, "RANKED", {"multikey": longtasks.multikey})
    monkeypatch.setattr(longtasks, "texts", lambda given: {"code": source})
    monkeypatch.setattr(
        longtasks,
        "readers",
        lambda given, of: iter(
            [
                _Lost(of, 64, ["kv8", "kv4c", "2 bits", "lost"], None),
                longtasks.Sparse(of, 64),
                longtasks.Blended(of, 64),
            ]
        ),
    )
    given = argparse.Namespace(
        lengths="320", tasks="text,ranked", prompts=0, ranked=1, windows=1, text=[], ways=""
    )
    given.out = tmp_path / "found.jsonl"
    with torch.inference_mode():
        found = list(longtasks.measure(given, loaded(), lambda said: None))
        again = list(longtasks.measure(given, loaded(), pytest.fail))
    assert again == found, "what lies in the file is not read again"
    texts = [row for row in found if row["task"] == "text: code"]
    assert len(texts) == 3
    for row in texts:
        kl = {way: score["all_kl"] for way, score in row["scores"].items()}
        assert kl.pop(EXACT) == 0.0
        if row["reader"] == "_Lost":
            assert kl["kv8"] < kl["kv4c"] < kl["2 bits"] < kl["lost"]
        elif row["reader"] == "Sparse":
            assert min(kl.values()) > 1e-4
        else:
            assert kl["blend: no token"] > kl["blend: values:0.3"]
    ranked = [row for row in found if row["task"] in RANKED]
    assert len(ranked) == 3
    assert all(0 <= score <= 1 for row in ranked for score in row["scores"].values())
    shown = list(longtasks.tables(found))
    assert [len(rows) for _, rows in shown] == [0, 12, 11]
    for head, rows in shown:
        assert all(len(row) == len(head) for row in rows)


def test_an_interval_is_that_of_the_ratio_of_the_same_prompts() -> None:
    assert longtasks.interval([1.0, 1.0], [1.0, 1.0]) == "1 [1, 1]"
    assert longtasks.interval([0.0, 1.0] * 50) == "0.5 [0.4, 0.6]"
    assert longtasks.interval([0.0, 0.5] * 8, [0.0, 1.0] * 8) == "0.5 [0.5, 0.5]"
