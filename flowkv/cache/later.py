"""Values that a device computes, read by the host once they are there, and what waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch

from flowkv.cache.store import PageStore


class Later:
    """Copies of tensors, on their way to the host from the moment that they are made.

    To read them waits for what the device was given before that moment, not for what came later.

    Args:
        *values: The tensors, on any devices; None stays None.
    """

    __slots__ = ("_events", "_held")

    def __init__(self, *values: torch.Tensor | None) -> None:
        self._events: list[torch.cuda.Event] = []
        self._held: list[torch.Tensor | None] = []
        devices = set[torch.device]()
        for value in values:
            if value is not None:
                if value.is_cuda:
                    devices.add(value.device)
                # With `non_blocking`, what leaves a GPU is copied into pinned memory.
                value = value.detach().to("cpu", non_blocking=value.is_cuda, copy=True)
            self._held.append(value)
        for device in devices:
            self._events.append(torch.cuda.current_stream(device).record_event())

    @property
    def ready(self) -> bool:
        """Whether `get` waits for no device, as it is where the CPU computed it all."""
        return not self._events

    def get(self) -> list[torch.Tensor | None]:
        """Return the values, on the CPU; wait for them where they are still on their way."""
        for event in self._events:
            event.synchronize()
        self._events = []
        return self._held


class Pending:
    """Work that waits for what devices say of pages, in its order. Callers hold the KV lock.

    What is asked for in a step is done at the end of the next one, and not before, however fast the
    device is: which page a step reads encoded is a matter of steps, not of time.

    Args:
        store: Holds the pages.
    """

    def __init__(self, store: PageStore) -> None:
        self._store, self._steps = store, 0
        self._work: deque[tuple[int, Later, Items[tuple[int, int]], Callable[[bool], None]]] = (
            deque()
        )

    def __len__(self) -> int:
        return len(self._work)

    def add(
        self, answer: Later, pages: Items[tuple[int, int]], work: Callable[[bool], None]
    ) -> None:
        """Do some work at once if no device is asked, else after the next step.

        Args:
            answer: What it waits for.
            pages: (group, page) that neither move nor become free until then.
            work: Given whether it was late.
        """
        if not self._work and answer.ready:
            work(False)
            return
        for group, page in pages:
            self._store.lend(group, page)
        self._work.append((self._steps, answer, pages, work))

    def end_step(self) -> None:
        """Do what was asked for before the step that ends."""
        while self._work and self._work[0][0] < self._steps:
            self._do()
        self._steps += 1

    def settle(self) -> bool:
        """Do all the work, and what it leads to; return whether there was any."""
        settled = bool(self._work)
        while self._work:
            self._do()
        return settled

    def _do(self) -> None:
        self._work[0][1].get()
        _, _, pages, work = self._work.popleft()
        for group, page in pages:
            self._store.give_back(group, page)
        work(True)
