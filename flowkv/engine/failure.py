"""Runs a step, and finds out whose fault it is if it fails."""

from __future__ import annotations

import traceback
from collections.abc import Sequence as Items

import torch

from flowkv.core.errors import CapacityError
from flowkv.engine.live import Live
from flowkv.engine.runner import Runner
from flowkv.runtime.restoration import Late

Part = tuple[Live, int]
"""A row's part of a step: whose, and how many new tokens."""


class Outcome:
    """What became of a step.

    Attributes:
        done: Parts that were computed, with logits `[B, V]` behind the last token of each.
        failed: Requests that fail by themselves, and with what.
        short: Why some of the other parts do not fit; None if they do.
        late: Others whose step waited for loads that do not come, and what it raised.
    """

    __slots__ = ("done", "failed", "late", "short")

    def __init__(self) -> None:
        self.done: list[tuple[Items[Part], torch.Tensor]] = []
        self.failed: list[tuple[Live, Exception]] = []
        self.short: CapacityError | None = None
        self.late: list[tuple[Live, Exception]] = []


def attempt(runner: Runner, parts: Items[Part]) -> Outcome:
    """Runs a step; where it raises, as many of its rows as possible.

    A step that raises leaves its rows where they were (`Runner.step`). It is tried again without
    the rows that have no token yet, then half by half, until who raises alone is known.

    Args:
        runner: Runs the model.
        parts: Of rows in no step.
    """
    outcome = Outcome()
    suspects = [parts] if runner.together else [[part] for part in reversed(parts)]
    while suspects:
        group = suspects.pop()
        error = _run(runner, group, outcome)
        if error is None:
            continue
        if isinstance(error, CapacityError):
            outcome.short = error
        elif isinstance(error, Late):
            outcome.late += [(live, error) for live, _ in group]
        elif len(group) == 1:
            outcome.failed.append((group[0][0], error))
        else:
            suspects += _newest(group) if group is parts else _halves(group)
    return outcome


def _run(runner: Runner, parts: Items[Part], outcome: Outcome) -> Exception | None:
    rows = [live.row for live, _ in parts]
    try:
        logits = runner.step(rows, [live.next(tokens) for live, tokens in parts])  # type: ignore[arg-type]
    except Exception as error:  # of the model, which may raise anything
        _let_go(error)
        return error
    outcome.done.append((parts, logits))
    return None


def _newest(parts: Items[Part]) -> list[Items[Part]]:
    """The rows that have no token yet, and the others, who come first; halves if all are alike."""
    fresh = [part for part in parts if not part[0].tokens]
    others = [part for part in parts if part[0].tokens]
    return [fresh, others] if fresh and others else _halves(parts)


def _halves(parts: Items[Part]) -> list[Items[Part]]:
    middle = len(parts) // 2
    return [parts[middle:], parts[:middle]]


def _let_go(error: BaseException | None) -> None:
    """Frees what the frames of a failed forward hold, activations above all; lines stay known."""
    left, seen = [error], set[int]()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:  # they may be the cause of each other
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
