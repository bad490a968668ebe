"""Write admission: against a plain account of the same rules, and in a ledger."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv.policy import make_policy
from flowkv.residency import Ledger, Place
from tests.inside import WRITE_RULES, ConfigError, WriteAdmission, as_slots, write_admission

LOSS = 0.1


class Account:
    """The rules over dictionaries, one page at a time."""

    def __init__(self, rule: str) -> None:
        self.rule, self.total, self.new = rule, 0, 0
        self.uses: dict[int, int] = {}
        self.turn: dict[int, int] = {}
        self.above: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.chosen: set[int] = set()
        self.went, self.back = [0] * 16, [0] * 16

    def access(self, slots: list[int]) -> None:
        self.total, self.new = self.total + self.new, 0
        for slot in slots:
            if slot in self.uses:
                self.uses[slot] += 1
                self.total += 1
                if slot in self.left:
                    self.back[self.left.pop(slot)] += 1
        self.age()

    def age(self) -> None:
        if self.total > write_admission.USES or sum(self.went) > write_admission.MEMORY:
            self.total //= 2
            self.went, self.back = ([n // 2 for n in book] for book in (self.went, self.back))

    def insert(self, slots: list[int], parents: list[int]) -> None:
        self.above.update((s, p) for s, p in zip(slots, parents, strict=True) if s in self.uses)
        self.choose([p for s, p in zip(slots, parents, strict=True) if s in self.chosen])
        for slot, parent in zip(slots, parents, strict=True):
            if slot not in self.uses:
                turn = self.turn[parent] + (self.uses[parent] > 1) if parent in self.uses else 0
                self.uses[slot], self.turn[slot], self.above[slot] = 1, min(turn, 15), parent
                self.new += 1

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            for book in (self.uses, self.turn, self.above, self.left):
                book.pop(slot, None)
            self.chosen.discard(slot)

    def poor(self) -> set[int]:
        usual = write_admission.USUAL
        mean = sum(self.back) / max(sum(self.went), 1)
        expected = [
            (b + usual * mean) / (w + usual) for b, w in zip(self.back, self.went, strict=True)
        ]
        order = sorted(range(16), key=expected.__getitem__)
        lost, found = 0, set()
        for turn in order:
            lost += self.back[turn]
            if lost <= LOSS * self.total:
                found.add(turn)
        return found

    def leave(self, slots: list[int]) -> list[bool]:
        answers = []
        for slot in slots:
            poor = self.poor()
            if self.rule == "second-touch":
                good = self.uses.get(slot, 0) > 1
            else:
                good = self.turn.get(slot, 0) not in poor
            answers.append(good or slot not in self.uses or slot in self.chosen)
            if slot in self.uses and slot not in self.left and slot not in self.chosen:
                self.left[slot] = self.turn[slot]
                self.went[self.turn[slot]] += 1
            self.choose([slot] if answers[-1] else [])
            self.age()
        return answers

    def choose(self, slots: list[int]) -> None:
        for slot in slots:
            while slot in self.uses and slot not in self.chosen:
                self.chosen.add(slot)
                slot = self.above[slot]


slots = st.lists(st.integers(0, 20), unique=True, max_size=6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("access"), slots),
        st.tuples(st.just("insert"), slots),
        st.tuples(st.just("leave"), slots),
        st.tuples(st.just("forget"), slots),
    ),
    min_size=15,
    max_size=60,
)


@pytest.mark.parametrize("rule", WRITE_RULES)
@settings(max_examples=150)
@given(events=events, uses=st.sampled_from([9, 999]), memory=st.sampled_from([4, 999]))
def test_decisions_are_those_of_the_plain_account(rule, events, uses, memory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_admission, "USUAL", 2)
        patch.setattr(write_admission, "USES", uses)
        patch.setattr(write_admission, "MEMORY", memory)
        mine, plain = WriteAdmission(rule, LOSS), Account(rule)
        for name, some in events:
            if name == "insert":
                parents = [-1, *some][: len(some)]
                mine.insert(as_slots(some), as_slots(parents))
                plain.insert(some, parents)
            elif name == "leave":
                said = mine.admits(as_slots(some[:1])).tolist()
                answers = mine.depart(as_slots(some)).tolist()
                assert answers == plain.leave(some) and answers[:1] == said
            else:
                getattr(mine, name)(as_slots(some))
                getattr(plain, name)(some)
            for slot in range(21):
                left = slot in plain.left and slot not in plain.chosen
                assert mine.declined(slot) == left
            assert not mine.declined(-1)


def test_a_page_above_that_comes_back_as_another_slot_is_admitted_with_those_below():
    rule = WriteAdmission("second-touch")
    rule.insert(as_slots([0, 1]), as_slots([-1, 0]))
    rule.access(as_slots([1]))
    assert rule.depart(as_slots([1])).all()
    rule.forget(as_slots([0]))
    rule.insert(as_slots([0, 2]), as_slots([-1, -1]))  # an unrelated page has its slot now
    assert not rule.admits(as_slots([0, 2])).any()
    rule.insert(as_slots([1]), as_slots([2]))
    assert rule.admits(as_slots([0, 2])).tolist() == [False, True]


def serve(ledger: Ledger, prompt: list[int], request: int) -> None:
    """Serves a prompt; pages are named by all tokens up to them."""
    ids = [[hash(tuple(prompt[: n + 1])) & (1 << 60) - 1, 7] for n in range(len(prompt))]
    ledger.serve(request, ledger.namespace(b""), np.array(ids, np.uint64), request=request)


def test_a_page_is_written_when_it_leaves_after_its_second_use():
    places = [Place(make_policy("lru"), 2), Place(make_policy("lru"), 99, lasts=True)]
    ledger = Ledger(places, admission=WriteAdmission("second-touch"))
    serve(ledger, [1, 2], 0)
    serve(ledger, [3, 4], 1)  # 1 and 2 leave after one use
    assert ledger.used_bytes(1) == 0 and ledger.declined == 2
    serve(ledger, [1, 2], 2)  # computed again: their second use
    serve(ledger, [5, 6], 3)
    assert ledger.used_bytes(1) == 2 and ledger.declined == 4


def test_what_leaves_one_lasting_place_for_another_is_not_asked_again():
    places = [Place(make_policy("lru"), 2), Place(make_policy("lru"), 2, lasts=True)]
    places.append(Place(make_policy("lru"), 99, lasts=True))
    ledger = Ledger(places, admission=WriteAdmission("second-touch"))
    for request, prompt in enumerate([[1, 2], [1, 2], [3, 4], [3, 4], [5, 6]]):
        serve(ledger, prompt, request)
    assert ledger.used_bytes(1) == ledger.used_bytes(2) == 2 and not ledger.declined


def test_auto_bounds_the_returns_that_it_gives_up():
    """Prompts that never return, beside conversations that do: only the first are declined."""
    places = [Place(make_policy("lru"), 40), Place(make_policy("lru"), 10**6, lasts=True)]
    rule = WriteAdmission("auto", loss=0.01)
    ledger, request = Ledger(places, admission=rule), 0
    for talk in range(120):
        for turns in (3, 6, 9):
            for once in range(3):
                serve(ledger, [1000 + request * 3 + once, *range(12)], request)
                request += 1
            serve(ledger, [talk, *range(turns)], request)
            request += 1
    assert 0 < ledger.declined < 120 * 9 * 13
    assert rule._back[rule._poor()].sum() <= 0.01 * rule._uses


def test_uses_that_memory_served_long_ago_permit_no_losses_now(monkeypatch):
    """Pages that return are written again, however long memory alone served before."""
    monkeypatch.setattr(write_admission, "USES", 1000)
    rule, asked = WriteAdmission("auto", loss=0.01), 0
    rule.insert(as_slots([0]), as_slots([-1]))
    for _ in range(50_000):
        rule.access(as_slots([0]))
    for page in range(1, 200):  # each leaves memory, and comes back
        one = as_slots([page])
        rule.insert(one, as_slots([-1]))
        asked += int(rule.depart(one)[0])
        rule.access(one)
    assert asked > 150


def test_an_unknown_rule_is_refused():
    with pytest.raises(ConfigError, match="no rule of write admission"):
        WriteAdmission("tinylfu")
