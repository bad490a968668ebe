"""Operands of every page kernel, and what goes between host and device beside it.

Operands are the pages, and the tokens of the rows of a step.

Shape legend (used by all kernels): B rows of a ragged batch, N new tokens of all rows together,
T new tokens of one row, S context of one row, P page size, Hq/Hk query and KV heads, D/Dv head
dims of K and V, L layers of the group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flowkv.core.geometry import PageLayout

GPUS = {"cuda"}
"""Types of devices that compute beside their host: queued work runs later than the host's code."""


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, copied there without a wait for what is queued there.

    A copy out of memory that is not pinned makes the host wait for its stream.
    """
    if device.type not in GPUS or host.device.type != "cpu":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


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
        if not (self._begin.query() and self._end.query()):
            return None
        return 1e-3 * float(self._begin.elapsed_time(self._end))

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class Pages(NamedTuple):
    """One layer of all pages of one layer group.

    Attributes:
        arena: The pool, uint8 `[bytes]`, contiguous; granule g begins at byte 4096 * g.
        layout: Layout of a raw page; open pages are raw.
        layer: Layer within the group, 0 to `layout.layers` - 1.
        sealed: Layouts of the other codecs that pages of the table may have, least lossy first.
    """

    arena: torch.Tensor
    layout: PageLayout
    layer: int
    sealed: tuple[PageLayout, ...] = ()


class Side(NamedTuple):
    """One side of a move of pages: memory, and where each page begins in it.

    Attributes:
        data: Contiguous uint8: an arena from the moved part's first granule on, or staging.
        places: int32 `[n]`, granules at which the pages begin. None: one after the other.
    """

    data: torch.Tensor
    places: torch.Tensor | None


class Ragged(NamedTuple):
    """Rows of one step. Planned once per step and group, read by every layer.

    Token j of row b stands at position `lengths[b] - T_b + j` of its sequence, where
    `T_b = starts[b + 1] - starts[b]`; it is element `starts[b] + j` of packed tensors.

    Attributes:
        table: int32 `[rows, pages]`: id of page p of a row (`core.geometry`): the granule at which
            it begins, its codec above that; -1 where a page is absent (beyond the end, or dropped
            behind a sliding window) and must not be read.
        rows: int32 `[B]`: line of `table` of each row.
        lengths: int32 `[B]`: tokens of each row, the new ones included.
        starts: int32 `[B + 1]`: first new token of each row in packed tensors; the last is N.
        most_new: max over rows of T, known on the host; in captured steps it may be more.
        most_length: max over rows of `lengths`, known on the host.
        most_prompts: Most rows with more than one new token; -1 if not counted. Bounds the memory
            reserved for decoding their sealed pages.
    """

    table: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    most_new: int
    most_length: int
    most_prompts: int = -1


class Scoring(NamedTuple):
    """Options of one attention call: its scores, and its outputs beside o.

    A token's logit is `cap(scale * q.k) + alibi * (its position - the query's)`.

    Attributes:
        scale: Scale of q.k.
        window: Tokens that a token sees, itself included; None for all before it.
        softcap: c in `cap(s) = c * tanh(s / c)`; None for none.
        sinks: `[Hq]`, logits that join each softmax's denominator.
        alibi: float32 `[Hq]`, slopes.
        tree: int64 `[N]`: a set bit j lets the token see new token j of its row, in place of the
            causal rule among a row's at most 64 new tokens. All before the new ones are seen.
        causal: False for cross-attention: each query sees all `lengths[b]` tokens of its row, and
            the queries' own tokens are in no page.
        mass: float32 `[B, pages, Hk]`: added to each page's entry is the weight that the row's
            queries give to the page, summed over them and over the query heads of the KV head.
        return_lse: Whether to return the normaliser.
        invariant: Whether a row's result must not depend on the rest of the batch, bit for bit.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None
    tree: torch.Tensor | None = None
    causal: bool = True
    mass: torch.Tensor | None = None
    return_lse: bool = False
    invariant: bool = False


class Rotary(NamedTuple):
    """Rotations of keys, a line for each position, or for each distance that pages move (RoPE).

    Frequency i turns the pair of dims `(start + i, start + R/2 + i)`, or, interleaved,
    `(start + 2i, start + 2i + 1)`: `(x, y) -> (x cos - y sin, y cos + x sin)`. Each product and sum
    is one correctly rounded float32 operation (float64 for float64 pages), the result is rounded
    once to the pages' dtype; so all implementations write the same bits.

    Attributes:
        cos: float32 `[lines, R/2]`.
        sin: float32 `[lines, R/2]`.
        interleaved: Whether pairs are neighbours, instead of one from either half of the R dims.
        start: First of the R rotated dims; the others stay unchanged.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    start: int = 0
