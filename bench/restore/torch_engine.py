"""Real restores on torch: a model with random weights, and a link that copies its keys and values.

What comes out is compared with a full prefill, number by number. Times are of this machine, and
labelled *measured*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench.restore.canvas import Canvas
from bench.restore.cuda import CudaCopier, CudaProcessor, CudaStream, Times
from bench.restore.device import Clock, Device, stopwatch
from bench.restore.encoded import EncodedStore
from bench.restore.executor import Executor, Unit
from bench.restore.model import VOCABULARY, Model
from bench.restore.processor import Copier, Link, Processor
from bench.restore.store import FileStore, HostStore, Ring, Store
from flowkv.core.errors import ConfigError
from flowkv.policy.restore import (
    Compute,
    Op,
    RestoreLoad,
    RestorePolicy,
    RestoreRequest,
    Source,
    Span,
    Suffix,
)
from flowkv.policy.restore.costs import Measured
from flowkv.sim.restore import LINK, Decoder, Run

UNIT = 64
"""Tokens of a page."""

ANSWER = 4
"""Tokens of an answer that are compared."""

DISK = "disk"
"""Name of the tier where prefixes lie as files."""

_RING_BYTES, _RING_BUFFERS, _ROUNDS = 16 << 20, 4, 3


class Prompt(NamedTuple):
    """How long a prompt is.

    Attributes:
        tokens: Of its prefix, which lies somewhere.
        suffix: Of what follows, which does not.
    """

    tokens: int
    suffix: int


class TorchEngine:
    """A model, and prompts whose prefixes were computed before.

    Args:
        shape: Of the model.
        prompts: Of random tokens; request `i` is the i-th of them.
        device: Where it computes.
        dtype: In what.
        folder: Where prefixes lie as files; None keeps them in host memory.
        codecs: In which prefixes lie there, most precise first; all but raw in host memory.
        seed: Of weights and tokens.

    Raises:
        ConfigError: No prompt, or one without a prefix; a codec does not fit the shape, or a
            prefix is no whole number of pages and a codec is not raw.
    """

    def __init__(
        self,
        shape: Decoder,
        prompts: Sequence[Prompt],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        folder: Path | None = None,
        codecs: Sequence[str] = ("raw",),
        seed: int = 0,
    ) -> None:
        if not prompts or min(prompt.tokens for prompt in prompts) < 1:
            raise ConfigError("There is no prefix to restore", "Name prompts of at least one token")
        self.device = torch.device(device)
        self.prompts, self._codecs = tuple(prompts), tuple(codecs)
        self.canvases: dict[int, Canvas] = {}
        longest = max(map(sum, prompts)) + ANSWER
        self.model = Model(shape, self.device, dtype, positions=longest, seed=seed)
        self._tokens = _random_tokens(self.prompts, seed, self.device)
        self._tier = LINK if folder is None else DISK
        self._kept: dict[int, HostStore] = {}
        self._stores: dict[int, list[Store]] = {}
        self._right: dict[int, list[int]] = {}
        self._streams: tuple[CudaStream, CudaStream] | None = None
        self._samples: dict[float, list[float]] = {}
        ring = None if folder is None else Ring(_RING_BYTES, _RING_BUFFERS, pin=self._cuda)
        for number, prompt in enumerate(self.prompts):
            canvas = self._canvas(number)
            canvas.prefill()
            self._right[number] = canvas.answer(ANSWER)
            kv = canvas.kv[:, : prompt.tokens]
            self._kept[number] = kept = HostStore(kv, pin=self._cuda and ring is None)
            self._stores[number] = []
            for codec in codecs:
                if codec != "raw":
                    self._stores[number].append(EncodedStore(kv, codec, UNIT, pin=self._cuda))
                elif folder is None or ring is None:
                    self._stores[number].append(kept)
                else:
                    file = FileStore(folder / f"prefix-{number}", kv, ring, UNIT)
                    self._stores[number].append(file)

    def requests(self) -> list[RestoreRequest]:
        """What there is to restore."""
        return [
            RestoreRequest(
                number=number,
                tokens=prompt.tokens,
                suffix=prompt.suffix,
                layers=self.model.shape.layers,
                unit=UNIT,
                sources=tuple(
                    Source(self._tier, codec, store.cell_bytes)
                    for codec, store in zip(self._codecs, self._stores[number], strict=True)
                ),
            )
            for number, prompt in enumerate(self.prompts)
        ]

    def restore(
        self,
        policy: RestorePolicy,
        costs: Measured | None = None,
        *,
        requests: Sequence[RestoreRequest] | None = None,
        bytes_per_s: float | None = None,
        share: float = 1.0,
        fails: Callable[[RestoreLoad], bool] | None = None,
    ) -> Run:
        """Restores into empty tensors, which `canvases` holds afterwards.

        Args:
            policy: Decides.
            costs: What the policy expects; it learns from what happens. None: it knows nothing yet.
            requests: Some of `requests`, or the same with other fields; None for all.
            bytes_per_s: Limit of the link; None for none.
            share: Of the computing, what restores get.
            fails: Loads that fail.

        Raises:
            StateError: The policy stopped too early, or begins what is not due.
        """
        requests = self.requests() if requests is None else requests
        self.canvases = {request.number: self._canvas(request.number) for request in requests}
        compute, link = self._devices(bytes_per_s, share, fails)
        costs = Measured() if costs is None else costs
        return Executor(policy, costs, [Unit(compute)], {self._tier: link}).run(requests)

    def error(self, number: int) -> float:
        """Largest difference of restored keys and values from those of the full prefill.

        NaN if something was not restored.
        """
        restored, kept = self.canvases[number].kv, self._kept[number].kv
        worst: list[float] = [
            (mine[: len(right)].float() - right.to(self.device).float()).abs().max().item()
            for mine, right in zip(restored, kept, strict=True)
        ]
        return max(worst, key=lambda x: (math.isnan(x), x))

    def same_tokens(self, number: int) -> bool:
        """Whether the next tokens are those that follow the full prefill."""
        found = self.canvases[number].answer(ANSWER)
        return found == self._right[number]

    def calibrated(self, *, bytes_per_s: float | None = None, share: float = 1.0) -> Measured:
        """What things take on this machine now: the fastest of some runs of each.

        For bounds, and as what a policy begins with. See `restore` for the arguments. What a GPU
        takes is measured once for each share, as it has nothing else to do.
        """
        request, costs, clock = self.requests()[0], Measured(), stopwatch()
        canvas = self._canvas(request.number)
        canvas.kv[:, : request.tokens] = self._kept[request.number].kv
        self.canvases = {request.number: canvas}
        compute, link = self._devices(bytes_per_s, share, None)
        spans = list(_spans(request.tokens))
        samples = self._samples.get(share)
        if samples is None:
            samples = _computed(compute, request, spans, clock)
            if self._cuda:
                self._samples[share] = samples
        for tokens, seconds in zip(spans, samples, strict=False):
            costs.computed(request, request.layers, tokens, seconds)
        if request.suffix:
            costs.suffixed(request, samples[-1])
        for source in range(len(request.sources)):
            for tokens in (Span(0, min(UNIT, request.tokens)), *spans):
                op = RestoreLoad(request.number, Span(0, request.layers), tokens, source)
                cells = request.layers * tokens.size
                costs.loaded(request, source, cells, _fastest_s(link, op, clock))
        return costs

    def close(self) -> None:
        """Removes files."""
        for store in (store for stores in self._stores.values() for store in stores):
            if isinstance(store, FileStore):
                store.close()
        self._stores.clear()

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def _canvas(self, number: int) -> Canvas:
        return Canvas(self.model, self._tokens[number], self.prompts[number].tokens, ANSWER)

    def _devices(
        self, bytes_per_s: float | None, share: float, fails: Callable[[RestoreLoad], bool] | None
    ) -> tuple[Device, Device]:
        """What computes, and what loads."""
        link = Link(self.canvases, self._stores, bytes_per_s, fails)
        if self._cuda:
            # The streams stay: memory that was freed on one is used again on that one only.
            self._streams = self._streams or (CudaStream(self.device), CudaStream(self.device))
            times = Times(self.device)
            compute = CudaProcessor(self.canvases, self._streams[0], times, share)
            return compute, CudaCopier(link, self._streams[1], times)
        return Processor(self.canvases, share), Copier(link)


def _computed(
    compute: Device, request: RestoreRequest, spans: Sequence[Span], clock: Clock
) -> list[float]:
    """Seconds of all layers of each span, and of the suffix."""
    layers = Span(0, request.layers)
    ops = [Compute(request.number, layers, tokens) for tokens in spans]
    suffix = [Suffix(request.number, layer) for layer in range(*layers)] if request.suffix else []
    seconds = [_fastest_s(compute, op, clock) for op in ops]
    return [*seconds, sum(_fastest_s(compute, op, clock) for op in suffix)]


def _fastest_s(device: Device, op: Op, clock: Clock) -> float:
    runs = (device.begin(op, clock).wait() for _ in range(_ROUNDS))
    return min(end_s - start_s for start_s, end_s, _ in runs)


def _spans(tokens: int) -> Iterator[Span]:
    """Pieces of a prefix: of two lengths, at several places."""
    for size in (tokens // 8, tokens // 3):
        size = max(UNIT, size // UNIT * UNIT)
        for first in range(0, tokens - size + 1, max(size, tokens // 3 // UNIT * UNIT)):
            yield Span(first, first + size)


def _random_tokens(
    prompts: Sequence[Prompt], seed: int, device: torch.device
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(VOCABULARY, (sum(prompt),), generator=generator).to(device)
        for prompt in prompts
    ]
