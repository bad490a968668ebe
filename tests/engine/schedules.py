"""Random schedules of an engine's steps: rows join, leave, are cut, set aside and begun anew."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

import flowkv
from flowkv import Request
from tests.inside import Forward, OpenRow, PackedRunner

Rows = dict[int, list[torch.Tensor]]
"""Logits of each request, behind its prompt and behind each new token."""


class Traced:
    """Requests that a random schedule continues greedily, and the logits that they saw.

    Args:
        kv: The cache.
        forward: Runs the model.
        prompts: Of the requests.
        new: New tokens of each.
        salted: Makes a request of a prompt.
    """

    def __init__(
        self, kv: flowkv.KV, forward: Forward, prompts: list[Any], new: int, salted: Any
    ) -> None:
        self.runner, self.new, self.salted = PackedRunner(kv, forward), new, salted
        self.texts = [list(prompt) for prompt in prompts]
        self.ends = [len(prompt) + new for prompt in prompts]
        self.rows: dict[int, OpenRow] = {}
        self.aside: set[int] = set()
        self.logits: Rows = {number: [] for number in range(len(prompts))}
        self.reused = 0

    def open(self, number: int) -> None:
        tokens = np.array(self.texts[number], np.uint32)
        request = self.salted(Request(prompt=tokens))
        self.rows[number] = row = self.runner.open(request, tokens, wait=True)
        self.reused += row.seq.length

    def step(self, shares: dict[int, int]) -> None:
        """Computes so many of the known tokens of some requests."""
        numbers, given = list(shares), []
        for number, share in shares.items():
            at = self.rows[number].seq.length
            given.append(np.array(self.texts[number][at : at + share], np.uint32))
        logits = self.runner.step([self.rows[number] for number in numbers], given)
        for number, line in zip(numbers, logits, strict=True):
            if self.missing(number) == 0:
                self.logits[number].append(line.clone())
                if len(self.texts[number]) < self.ends[number]:
                    self.texts[number].append(int(line.argmax()))
                else:
                    self.rows.pop(number).close()

    def missing(self, number: int) -> int:
        return len(self.texts[number]) - self.rows[number].seq.length

    @property
    def pending(self) -> list[int]:
        """Requests that are not finished."""
        return [n for n, seen in self.logits.items() if len(seen) <= self.new]


def alone(traced: Traced, number: int) -> None:
    """The whole prompt at once, then token by token, with nobody else there."""
    traced.open(number)
    while number in traced.rows:
        traced.step({number: traced.missing(number)})


def at_random(traced: Traced, seed: int, *, budget: int = 40) -> None:
    """Joins, leaves, chunks, preemptions that keep pages, and ones that drop them."""
    draw = random.Random(seed)
    while pending := traced.pending:
        for number in pending:
            if number not in traced.rows and draw.random() < 0.4:
                traced.open(number)
            elif number in traced.aside and draw.random() < 0.5:
                traced.rows[number].resume()
                traced.aside.discard(number)
            elif number in traced.rows and number not in traced.aside and draw.random() < 0.1:
                if draw.random() < 0.5:
                    traced.rows[number].suspend()
                    traced.aside.add(number)
                else:
                    traced.rows.pop(number).close()
        ready = [n for n in traced.rows if n not in traced.aside and draw.random() < 0.8]
        draw.shuffle(ready)
        shares, left = dict[int, int](), budget
        for number in ready:
            most = min(traced.missing(number), left)
            if most > 0:
                shares[number] = draw.choice([most, draw.randint(1, most)])
                left -= shares[number]
        if shares:
            traced.step(shares)
