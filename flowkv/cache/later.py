"""Values that a device computes, read by the host once they are there."""

from __future__ import annotations

import torch


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
        """Whether `get` returns at once."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def get(self) -> list[torch.Tensor | None]:
        """Return the values, on the CPU; wait for them where they are still on their way."""
        for event in self._events:
            event.synchronize()
        self._events = []
        return self._held
