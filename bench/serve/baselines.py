"""Baselines of engines: the same model, served by transformers alone.

All of them are greedy, make exactly as many tokens as are asked for, and stamp tokens when they can
be read on the CPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from bench.serve.models import batching
from bench.serve.served import Outcome, Served
from bench.serve.workload import Ask
from flowkv.core.errors import ConfigError
from flowkv.demo.timing import Stamps

SEQUENTIAL, STATIC, BATCHED = "sequential generate", "static batches", "generate_batch"


class System(Protocol):
    """Something that serves loads.

    Attributes:
        name: In the column `baseline`; "" for the engine.
    """

    name: str

    def serve(self, asks: Sequence[Ask], clients: int) -> Outcome:
        """Serves a load.

        Args:
            asks: Its requests.
            clients: How many ask at once where requests bring no times; most rows at once.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds."""
        ...


class Waiting:
    """Requests in the order in which they come, for a server that takes some and finishes them.

    Args:
        asks: A load.
        clients: How many ask at once where requests bring no times.
    """

    def __init__(self, asks: Sequence[Ask], clients: int) -> None:
        self._began_s = time.perf_counter()
        self._closed = not any(ask.at_s for ask in asks)
        self._coming = deque(enumerate(asks))
        self._here: deque[tuple[int, Ask, float]] = deque()
        if self._closed:
            self.answered(clients)

    def answered(self, count: int) -> None:
        """So many clients have their answers, and ask anew."""
        now = time.perf_counter()
        for _ in range(min(count, len(self._coming)) if self._closed else 0):
            number, ask = self._coming.popleft()
            self._here.append((number, ask, now))

    def take(self, most: int) -> list[tuple[int, Ask, float]]:
        """Up to so many that are here: their numbers and times; waits for one, () at the end."""
        while True:
            passed_s = time.perf_counter() - self._began_s
            while not self._closed and self._coming and self._coming[0][1].at_s <= passed_s:
                number, ask = self._coming.popleft()
                self._here.append((number, ask, self._began_s + ask.at_s))
            if self._here or not self._coming:
                return [self._here.popleft() for _ in range(min(most, len(self._here)))]
            time.sleep(max(0.0, self._coming[0][1].at_s - passed_s))


class Generate:
    """`generate`, one request after the other, or in batches that are padded to the longest.

    Args:
        model: A Hugging Face causal language model without FlowKV.
        batches: Whether as many as wait go together; the batch ends with its longest answer.
    """

    def __init__(self, model: Any, *, batches: bool) -> None:
        self._model, self._batches = model, batches
        self.name = STATIC if batches else SEQUENTIAL

    def serve(self, asks: Sequence[Ask], clients: int) -> Outcome:
        waiting, found = Waiting(asks, clients), dict[int, Served]()
        while taken := waiting.take(clients if self._batches else 1):
            stamps, made = self._run([ask for _, ask, _ in taken])
            for row, (number, ask, submitted_s) in enumerate(taken):
                last_s = stamps[ask.new_tokens]  # the first stamp is the prompt's
                tokens = made[row][: ask.new_tokens]
                found[number] = Served(submitted_s, stamps[1], last_s, tokens)
            waiting.answered(len(taken))
        return Outcome([found[number] for number in range(len(asks))])

    def close(self) -> None:
        """Holds nothing."""

    def _run(self, asks: Sequence[Ask]) -> tuple[list[float], list[list[int]]]:
        width = max(len(ask.prompt) for ask in asks)
        ids = torch.zeros((len(asks), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(asks):
            ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        device, stamps = self._model.device, Stamps()
        made = self._model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max(ask.new_tokens for ask in asks),
            do_sample=False,
            streamer=stamps,
        )
        return stamps.wall_s, made[:, width:].tolist()


class Batched:
    """Transformers' own continuous batching, which `generate_batch` runs.

    Its manager is kept between loads, and its thread is started before the clock is, which makes it
    faster than calls of `generate_batch`. Prefixes are shared, as it does by default.

    Args:
        model: A Hugging Face causal language model without FlowKV.
        most_rows: Of a step.
        token_budget: Most tokens of a step.
        pool_tokens: Of its cache.
    """

    name = BATCHED

    def __init__(self, model: Any, *, most_rows: int, token_budget: int, pool_tokens: int) -> None:
        self._model, self._attention = model, model.config._attn_implementation
        self._running = batching(
            model, most_rows=most_rows, token_budget=token_budget, pool_tokens=pool_tokens
        )
        self._manager = self._running.__enter__()

    def serve(self, asks: Sequence[Ask], clients: int) -> Outcome:
        began_s, numbers, found = time.perf_counter(), dict[str, int](), dict[int, Served]()
        coming = iter(enumerate(asks))
        closed = not any(ask.at_s for ask in asks)

        def submit(count: int) -> None:
            for number, ask in _some(coming, count):
                _sleep_until(began_s + ask.at_s)
                name = self._manager.add_request(
                    ask.prompt, max_new_tokens=ask.new_tokens, record_timestamps=True
                )
                numbers[name] = number

        submit(clients if closed else len(asks))
        while len(found) < len(asks):
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                self._check()
                continue
            number, times = numbers[result.request_id], result.timestamps
            if result.error or not times:
                raise ConfigError(f"generate_batch failed: {result.error}", "Leave it out")
            found[number] = Served(
                result.created_time, times[0], times[-1], list(result.generated_tokens)
            )
            if closed:
                submit(1)
        return Outcome([found[number] for number in range(len(asks))])

    def close(self) -> None:
        """Stops its thread; the model attends as before."""
        self._running.__exit__(None, None, None)
        self._model.set_attn_implementation(self._attention)

    def _check(self) -> None:
        if not self._manager.is_running():
            raise ConfigError("generate_batch stopped", "Run without it: leave it out")


def _some(coming: Iterator[tuple[int, Ask]], count: int) -> Iterator[tuple[int, Ask]]:
    for _, one in zip(range(count), coming, strict=False):
        yield one


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.perf_counter()))
