"""Asynchronous reads of values that a device computes, and work that waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch

from flowkv.cache.store import PageStore
from flowkv.kernels.operands import GPUS


class Later:
    """Copies of tensors to the host, started when the object is made.

    A read waits for the work queued on the device before that, not for later work.

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
                if queued := value.device.type in GPUS:
                    devices.add(value.device)
                # With `non_blocking`, torch copies from a GPU into pinned memory.
                value = value.detach().to("cpu", non_blocking=queued, copy=True)
            self._held.append(value)
        for device in devices:
            self._events.append(torch.cuda.current_stream(device).record_event())

    @property
    def ready(self) -> bool:
        """Return whether `result` need not wait, as for values that the CPU computed."""
        return not self._events

    def result(self) -> list[torch.Tensor | None]:
        """Return the values, on the CPU; wait for them where they are still on their way."""
        for event in self._events:
            event.synchronize()
        self._events = []
        return self._held


class DeviceTimer:
    """Timer of the work that a GPU does for its current stream, from now until `stop`.

    The host queues a prompt's work in a fraction of the time that the device takes for it.

    Args:
        device: The GPU.
    """

    __slots__ = ("_begin", "_device", "_end")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._end = self._mark()

    def stop(self) -> None:
        """End the time behind the work that is queued now."""
        self._end = self._mark()

    def seconds(self) -> float | None:
        """Return the time; None while the device has not come to both ends."""
        # Another stream than the one of the end may still be on its way to the begin.
        if not (self._begin.query() and self._end.query()):  # type: ignore[no-untyped-call]
            return None
        return 1e-3 * float(self._begin.elapsed_time(self._end))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


class Pending:
    """Queue of work that waits for device results about pages. Callers hold the KV lock.

    Work added in a step is done at the end of the next one, and not before, however fast the
    device is: so the encoded pages that a step reads depend on steps, not on time.

    Args:
        store: Holds the pages.

    Attributes:
        work: The queue: step, answer, pages and work of each entry; empty in most steps.
    """

    def __init__(self, store: PageStore) -> None:
        self._store, self._steps = store, 0
        self.work: deque[tuple[int, Later, Items[tuple[int, int]], Callable[[bool], None]]] = (
            deque()
        )

    def defer(
        self, answer: Later, pages: Items[tuple[int, int]], work: Callable[[bool], None]
    ) -> None:
        """Do work at once if its values are there and none is queued, else after the next step.

        Args:
            answer: The values that the work waits for.
            pages: (group, page) that neither move nor become free until then.
            work: Called with whether it was deferred.
        """
        if not self.work and answer.ready:
            work(False)
            return
        for group, page in pages:
            self._store.pool(group).lend(page)
        self.work.append((self._steps, answer, pages, work))

    def end_step(self) -> None:
        """Do the work that was added before the step that ends."""
        while self.work and self.work[0][0] < self._steps:
            self._do()
        self._steps += 1

    def run_all(self) -> bool:
        """Do all queued work, and any that it adds, also where some raises.

        Returns:
            Whether there was any.
        """
        settled = bool(self.work)
        try:
            while self.work:
                self._do()
        finally:
            if self.work:
                self.run_all()
        return settled

    def _do(self) -> None:
        self.work[0][1].result()
        _, _, pages, work = self.work.popleft()
        for group, page in pages:
            self._store.pool(group).give_back(page)
        work(True)
