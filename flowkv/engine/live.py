"""A request while an engine has it."""

from __future__ import annotations

import math
from contextvars import Context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowkv.core import compiling
from flowkv.engine.answer import Answer
from flowkv.engine.request import Completion, Reason, Request
from flowkv.engine.runner import Row
from flowkv.engine.sampling import Choice
from flowkv.policy.scheduling import COMING, RUNNING, WAITING, Job


class Live(Job):
    """A request, its row, and what was made of it. Belongs to the thread that runs the engine.

    Attributes:
        request: What was asked.
        answer: Where it goes.
        choice: How its tokens are chosen.
        due_s: Its deadline, as by `compiling.now_s`.
        begin: Its prompt.
        known: Its prompt, and what was made of it before its row was dropped last.
        tokens: The new tokens.
        row: Its row; None while it has none.
        reused: Tokens of its prompt that needed no computing.
        queued_s: From submission until it was first admitted.
        first_s: When its first token was there; 0.0 before.
        last_s: When its latest token was there.
        restore_s: See `Completion`.
        exposed_s: See `Completion`.
        context: Where it was submitted, for those who are told that it was; None afterwards.
        queued: What `KV.enqueue` returned, while it waits; None where nobody looked ahead.
    """

    __slots__ = (
        "answer",
        "begin",
        "choice",
        "context",
        "due_s",
        "exposed_s",
        "first_s",
        "known",
        "last_s",
        "queued",
        "queued_s",
        "request",
        "restore_s",
        "reused",
        "row",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        prompt: NDArray[np.uint32],
        choice: Choice,
        answer: Answer,
        arrived_s: float,
        context: Context | None = None,
    ) -> None:
        late = math.inf if request.deadline_s is None else arrived_s + request.deadline_s
        super().__init__(
            answer.number,
            arrived_s,
            len(prompt),
            request.max_new_tokens,
            priority=request.priority,
            deadline_s=late,
        )
        self.due_s = math.inf if request.deadline_s is None else compiling.now_s()
        self.due_s += request.deadline_s or 0.0
        self.request, self.answer, self.choice = request, answer, choice
        self.context = context
        self.begin = self.known = prompt
        self.tokens = answer._made
        self.row: Row | None = None
        self.queued: Any = None
        self.reused = 0
        self.queued_s = -1.0
        self.first_s = self.last_s = self.restore_s = self.exposed_s = 0.0

    @property
    def open_row(self) -> Row:
        """Its row."""
        assert self.row is not None
        return self.row

    def next(self, count: int) -> Any:
        """Its next token ids, as `KV.step` takes them."""
        ready = self.ready
        if ready < self.known.size:
            return self.known[ready : ready + count]
        return self.tokens[-1:]

    def admitted(self, now_s: float) -> float:
        """Notes the end of a wait; returns its length."""
        if self.queued_s < 0.0:
            self.queued_s = now_s - self.arrived_s
        return now_s - self.since_s

    def dropped(self, now_s: float) -> None:
        """Its row is gone; it is begun anew, with what it made."""
        self.row, self.ready, self.pages = None, 0, 0
        self.known = np.concatenate([self.begin, np.asarray(self.tokens, np.uint32)])
        self.move(WAITING, now_s)

    def completion(self, reason: Reason, now_s: float) -> Completion:
        """What became of it."""
        further = len(self.tokens) - 1
        return Completion(
            tokens=self.tokens.copy(),
            reason=reason,
            prompt_tokens=self.prompt,
            reused_tokens=self.reused,
            queued_s=now_s - self.arrived_s if self.queued_s < 0.0 else self.queued_s,
            ttft_s=self.first_s - self.arrived_s if self.first_s else 0.0,
            tpot_s=(self.last_s - self.first_s) / further if further > 0 else 0.0,
            seconds=now_s - self.arrived_s,
            preempted=self.preempted,
            restore_s=self.restore_s,
            exposed_s=self.exposed_s,
        )

    @property
    def active(self) -> bool:
        """Whether it has part in steps."""
        return self.state in (COMING, RUNNING)
