"""How far restores are: what was begun, what is done, and what was lost on the way.

Whoever executes a restore (virtual clock, emulated devices, torch, the runtime) tells it `begin`,
`end` and `fail`; policies only read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from flowkv.core.errors import StateError
from flowkv.policy.restore.words import Compute, Load, Op, Request, Span, Suffix


class Costs(Protocol):
    """What things are expected to take, in seconds; 0.0 while that is not known."""

    def compute_s(self, request: Request, layers: int, tokens: Span) -> float:
        """Computing so many layers of these tokens."""
        ...

    def suffix_s(self, request: Request) -> float:
        """Computing all layers of the suffix."""
        ...

    def load_s(self, request: Request, source: int, cells: int) -> float:
        """Loading so many cells (tokens times layers) at once."""
        ...


class Progress:
    """One request's cells.

    Attributes:
        request: Whose.
        front: Per layer: tokens that computes were begun for, from the first one on.
        back: Per layer: first token that loads were begun for.
        computed: Per layer: tokens that are computed (or were resident).
        missing: Per layer: tokens of loads that were begun and have not ended.
        suffix: Layers of the suffix that were begun.
        answered: Layers of the suffix that are done.
        flying: Ops that were begun and have not ended.
        lost: Tokens up to which nothing can be loaded, because a load of theirs failed.
        fronted: Its front has ended: of the prefix nothing is computed any more, and the suffix
            waits for the rest, layer by layer.
    """

    __slots__ = (
        *(
            "answered",
            "back",
            "computed",
            "flying",
            "front",
            "fronted",
            "lost",
            "missing",
            "request",
            "suffix",
        ),
    )

    def __init__(self, request: Request) -> None:
        layers = request.layers
        self.request = request
        self.front, self.computed = [request.resident] * layers, [request.resident] * layers
        self.back, self.missing = [request.tokens] * layers, [0] * layers
        self.suffix = self.answered = self.lost = 0
        self.fronted = False
        self.flying: list[Op] = []

    def gap(self, layer: int) -> int:
        """Tokens of a layer that nothing was begun for."""
        return max(0, self.back[layer] - self.front[layer])

    def cells(self) -> int:
        """Cells that nothing was begun for."""
        return sum(map(self.gap, range(self.request.layers)))

    def there(self, layer: int) -> bool:
        """Whether all cells of a layer's prefix are there."""
        whole = self.front[layer] >= self.back[layer] and not self.missing[layer]
        return whole and self.computed[layer] >= self.back[layer]

    @property
    def met(self) -> bool:
        """Whether something was begun for every cell."""
        return all(f >= b for f, b in zip(self.front, self.back, strict=True))

    @property
    def restored(self) -> bool:
        """Whether the whole prefix is there."""
        return all(map(self.there, range(self.request.layers)))

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        suffix = self.request.layers if self.request.suffix else 0
        return self.answered >= suffix and self.restored


class State:
    """Restores that are under way, together.

    Args:
        costs: What things are expected to take.

    Attributes:
        now_s: The time, as whoever executes tells it.
        requests: By number, in order of arrival.
        link_cells: Cells of loads under way, by tier.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now_s = costs, 0.0
        self.requests: dict[int, Progress] = {}
        self.link_cells: dict[str, int] = {}

    def add(self, request: Request) -> Progress:
        """A request arrived."""
        if request.number in self.requests:
            raise StateError(f"request {request.number} is there already", "Number it otherwise")
        progress = self.requests[request.number] = Progress(request)
        return progress

    def remove(self, number: int) -> None:
        """A request is done, or was called off."""
        progress = self.requests.pop(number)
        for op in progress.flying:
            if isinstance(op, Load):
                self._count(progress.request, op, -1)

    def fronted(self, number: int) -> None:
        """Nobody computes any more of a request's prefix."""
        self.requests[number].fronted = True

    def __iter__(self) -> Iterator[Progress]:
        return iter(self.requests.values())

    def among(self, numbers: Iterable[int] | None) -> Iterator[Progress]:
        """Those with these numbers; all of them if that is None."""
        if numbers is None:
            return iter(self)
        return (self.requests[number] for number in numbers if number in self.requests)

    # ---- what happens

    def begin(self, op: Op) -> None:
        """An op is begun; its cells are taken.

        Raises:
            StateError: It does not go on where the pointers are. The verifier says more.
        """
        progress = self.requests[op.request]
        if isinstance(op, Suffix):
            if op.layer != progress.suffix or not progress.there(op.layer):
                raise StateError(f"{op} is not due", "Ask the policy again")
            progress.suffix += 1
        elif isinstance(op, Compute):
            layers = range(*op.layers)
            begins = all(progress.front[layer] == op.tokens.first for layer in layers)
            fits = all(op.tokens.stop <= progress.back[layer] for layer in layers)
            self._meets(op, begins and fits)
            for layer in layers:
                progress.front[layer] = op.tokens.stop
        else:
            layers = range(*op.layers)
            ends = all(progress.back[layer] == op.tokens.stop for layer in layers)
            fits = all(op.tokens.first >= progress.front[layer] for layer in layers)
            self._meets(op, ends and fits and op.tokens.first >= progress.lost)
            for layer in layers:
                progress.back[layer] = op.tokens.first
                progress.missing[layer] += op.tokens.size
            self._count(progress.request, op, 1)
        progress.flying.append(op)

    def end(self, op: Op) -> None:
        """An op is done: its cells are there."""
        progress = self.requests[op.request]
        progress.flying.remove(op)
        if isinstance(op, Suffix):
            progress.answered += 1
        elif isinstance(op, Compute):
            for layer in range(*op.layers):
                progress.computed[layer] = op.tokens.stop
        else:
            self._landed(progress, op)

    def fail(self, op: Op) -> None:
        """A load failed: all up to its last token must be computed, what came of it is dropped."""
        if not isinstance(op, Load):
            raise StateError(f"{op} cannot fail", "Only loads do")
        progress = self.requests[op.request]
        progress.flying.remove(op)
        self._landed(progress, op)
        progress.lost = max(progress.lost, op.tokens.stop)
        for layer in range(progress.request.layers):
            progress.back[layer] = max(progress.back[layer], progress.lost)

    def _landed(self, progress: Progress, op: Load) -> None:
        for layer in range(*op.layers):
            progress.missing[layer] -= op.tokens.size
        self._count(progress.request, op, -1)

    def _count(self, request: Request, op: Load, sign: int) -> None:
        tier = request.sources[op.source].tier
        cells = sign * op.layers.size * op.tokens.size
        self.link_cells[tier] = self.link_cells.get(tier, 0) + cells

    @staticmethod
    def _meets(op: Compute | Load, right: bool) -> None:
        if not right or op.tokens.size <= 0 or op.layers.size <= 0:
            raise StateError(f"{op} does not go on where the pointers are", "Ask the policy again")
