"""Markov chains of order 0 to 3 that learn from the stream of uses what is used next.

For streams that have no prompts in them: weight blocks, experts, rows of embeddings. (Prefix trees
say by themselves *which* block follows; there the question is *when*, and `hazard` asks it.)

Every context, the last j symbols, keeps a few successors and how often each followed, lately. The
orders are blended from the lowest up, P_j = l p_j + (1 - l) P_(j-1): the weight l belongs to an
order and to how often its context was seen, and is learned online as the share of the uses that the
order explains better than those below (Jelinek and Mercer's interpolation, with one step of
expectation maximisation a symbol). So an order that the stream does not have costs nothing, and a
context that was never seen falls back by itself. Old habits fade with each visit of a context.

Memory is bounded: a table of contexts per order, sets of four, the longest unused replaced. Only
additions, multiplications and divisions: the same stream gives the same bits on every machine.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from flowkv.core.errors import ConfigError
from flowkv.policy.base import PolicyConfig, Slots, configure
from flowkv.policy.order.compiled import Array, inner, kernel

WAYS = 4
BUCKETS = 8
BEAM = 8
UNSEEN = 1.0 / 65536.0  # of a symbol that no order knows
TRUST = 1.0 / 256.0  # step of the weights
LEAST = 1.0 / 64.0  # every order keeps a chance
HISTORY, CLOCK = 3, 3  # entries of the state: the last symbols, latest last; symbols so far


class MarkovConfig(PolicyConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of `Markov`.

    Attributes:
        order: Symbols that a context has at most.
        contexts: Contexts of each order that are remembered, a power of two.
        successors: Successors of each.
        memory: Visits of a context after which a habit counts about a third.
    """

    order: Annotated[int, Meta(ge=1, le=3)] = 3
    contexts: Annotated[int, Meta(ge=WAYS, le=1 << 20)] = 8192
    successors: Annotated[int, Meta(ge=1, le=64)] = 16
    memory: Annotated[int, Meta(ge=2, le=1 << 20)] = 128


@inner
def context_key(state: Array, order: int) -> int:
    """The last `order` symbols as one number, never 0."""
    x = np.uint64(order + 1)
    for i in range(HISTORY - order, HISTORY):
        x = (x ^ np.uint64(state[i])) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(32)
    return int(np.int64(x | np.uint64(1)))


@inner
def find(rows: Array, key: int) -> int:
    """Where a context is, or -1 - where it would go: a free place, or the longest unused."""
    first = int((np.uint64(key) >> np.uint64(1)) % np.uint64(len(rows) // WAYS)) * WAYS
    worst = first
    for i in range(first, first + WAYS):
        if rows[i].key == key:
            return i
        if rows[i].last < rows[worst].last:
            worst = i
    return -1 - worst


@inner
def bucket(visits: int) -> int:
    """Roughly the logarithm of how often a context was seen."""
    b = 0
    while visits > 1 and b < BUCKETS - 1:
        visits >>= 1
        b += 1
    return b


@inner
def share_of(row: Any, symbol: int) -> float:
    """How often `symbol` followed a context, lately."""
    for k in range(len(row.symbols)):
        if row.shares[k] > 0.0 and row.symbols[k] == symbol:
            return float(row.shares[k])
    return 0.0


@inner
def follow(row: Any, symbol: int, memory: int) -> None:
    """`symbol` followed once more. One that is new takes the place and the share of the rarest."""
    row.visits += 1
    step = 1.0 / min(row.visits, memory)
    at, rarest = -1, 0
    for k in range(len(row.symbols)):
        row.shares[k] *= 1.0 - step
        if row.shares[k] > 0.0 and row.symbols[k] == symbol:
            at = k
        if row.shares[k] < row.shares[rarest]:
            rarest = k
    if at < 0:
        at = rarest
        row.symbols[at] = symbol
    row.shares[at] += step


@kernel
def observe(tables: Array, trust: Array, state: Array, stream: Array, memory: int) -> None:
    """`tables` [order + 1, contexts] rows, `trust` [order + 1, BUCKETS], `state` history, clock."""
    orders = len(tables)
    for x in stream:
        state[CLOCK] += 1
        below = UNSEEN
        for order in range(min(orders, state[CLOCK])):  # the first symbols have short contexts
            rows = tables[order]
            key = context_key(state, order)
            i = find(rows, key)
            if i < 0:
                i = -1 - i
                rows[i].key = key
                rows[i].visits = 0
                rows[i].symbols[:] = 0
                rows[i].shares[:] = 0.0
            row = rows[i]
            row.last = state[CLOCK]
            if row.visits > 0:
                b = bucket(row.visits)
                mine = trust[order, b] * share_of(row, x)
                below = mine + (1.0 - trust[order, b]) * below
                learned = trust[order, b] + TRUST * (mine / below - trust[order, b])
                trust[order, b] = min(max(learned, LEAST), 1.0 - LEAST)
            follow(row, x, memory)
        for i in range(HISTORY - 1):
            state[i] = state[i + 1]
        state[HISTORY - 1] = x


@inner
def give(symbols: Array, scores: Array, count: int, symbol: int, score: float) -> int:
    """Adds to the score of a symbol; returns how many symbols there are."""
    for k in range(count):
        if symbols[k] == symbol:
            scores[k] += score
            return count
    if count < len(symbols):
        symbols[count] = symbol
        scores[count] = score
        return count + 1
    return count


@inner
def blend(tables: Array, trust: Array, state: Array, symbols: Array, scores: Array) -> int:
    """What follows this history: fills symbols and probabilities, returns how many."""
    count, rest = 0, 1.0
    for order in range(min(len(tables) - 1, state[CLOCK] - 1), -1, -1):
        i = find(tables[order], context_key(state, order))
        if i < 0 or tables[order][i].visits == 0:
            continue
        row = tables[order][i]
        weight = rest * trust[order, bucket(row.visits)]
        for k in range(len(row.symbols)):
            if row.shares[k] > 0.0:
                count = give(symbols, scores, count, row.symbols[k], weight * row.shares[k])
        rest -= weight
    return count


@inner
def best(symbols: Array, scores: Array, count: int, n: int) -> int:
    """Moves the `n` best to the front, in order; ties: the smaller symbol. Returns how many."""
    n = min(n, count)
    for i in range(n):
        top = i
        for k in range(i + 1, count):
            if scores[k] > scores[top] or (scores[k] == scores[top] and symbols[k] < symbols[top]):
                top = k
        symbols[i], symbols[top] = symbols[top], symbols[i]
        scores[i], scores[top] = scores[top], scores[i]
    return n


@inner
def extend(beams: Array, row: int, grown: int, history: Array, step: tuple[int, float]) -> int:
    """A history and its next symbol, of some chance, joins the likeliest; returns how many."""
    at = grown
    if grown == BEAM:
        at = 0
        for j in range(BEAM):
            if beams[row, j].chance < beams[row, at].chance:
                at = j
        if beams[row, at].chance >= step[1]:
            return grown
    beam = beams[row, at]
    beam.chance = step[1]
    for i in range(HISTORY - 1):
        beam.state[i] = history[i + 1]
    beam.state[HISTORY - 1] = step[0]
    beam.state[CLOCK] = history[CLOCK] + 1
    return min(grown + 1, BEAM)


@kernel
def predict(
    tables: Array,
    trust: Array,
    beams: Array,
    symbols: Array,
    scores: Array,
    n: int,
    steps: int,
) -> int:
    """Fills symbols and expected uses within `steps`; rows of `symbols`: result, scratch.

    `beams` [2, BEAM]: likely histories and their probabilities; the first of row 0 is the present.
    """
    found, size = 0, 1
    for step in range(steps):
        here, grown = step % 2, 0
        for b in range(size):
            history, chance = beams[here, b].state, beams[here, b].chance
            count = blend(tables, trust, history, symbols[1], scores[1])
            for k in range(count):
                scores[1, k] *= chance
                found = give(symbols[0], scores[0], found, symbols[1, k], scores[1, k])
            if step + 1 < steps:
                for k in range(best(symbols[1], scores[1], count, BEAM)):
                    likely = (symbols[1, k], scores[1, k])
                    grown = extend(beams, 1 - here, grown, history, likely)
        size = grown
    return int(best(symbols[0], scores[0], found, n))


class Markov:
    """Predicts the next uses of one stream.

    Args:
        **options: Fields of `MarkovConfig`.

    Raises:
        ConfigError: If an option is unknown or wrong.
    """

    name = "markov"

    def __init__(self, **options: object) -> None:
        self.config = config = configure(MarkovConfig, self.name, options)
        if config.contexts & (config.contexts - 1):
            raise ConfigError(
                f"a table of {config.contexts} contexts is no power of two",
                f"Use {1 << config.contexts.bit_length()}",
            )
        row = [("key", np.int64), ("last", np.int64), ("visits", np.int64)]
        width = (config.successors,)
        fields = [*row, ("symbols", np.int64, width), ("shares", np.float64, width)]
        self._tables = np.zeros((config.order + 1, config.contexts), np.dtype(fields))
        self._trust = np.full((config.order + 1, BUCKETS), 0.5)
        self._state = np.zeros(HISTORY + 1, np.int64)
        beam = np.dtype([("chance", np.float64), ("state", np.int64, (HISTORY + 1,))])
        self._beams = np.zeros((2, BEAM), beam)

    def observe(self, symbols: Slots) -> None:
        """These were used, in this order."""
        stream = np.ascontiguousarray(symbols, np.int64)
        observe(self._tables, self._trust, self._state, stream, self.config.memory)

    def predict(self, n: int, steps: int = 1) -> tuple[Slots, NDArray[np.float64]]:
        """The `n` symbols that are likeliest to be used within the next `steps`, best first.

        Args:
            n: How many at most.
            steps: How far ahead; beyond the next one, only the likeliest ways are followed.

        Returns:
            Symbols, and how many uses of each are expected.
        """
        if n < 1 or steps < 1:
            return np.empty(0, np.int64), np.empty(0)
        room = self.config.successors * (self.config.order + 1)
        symbols = np.zeros((2, room * (BEAM * steps if steps > 1 else 1)), np.int64)
        scores = np.zeros(symbols.shape)
        self._beams[0, 0]["chance"] = 1.0
        self._beams[0, 0]["state"] = self._state
        args = (self._tables, self._trust, self._beams, symbols, scores)
        count = predict(*args, n, steps)
        return symbols[0, :count].copy(), scores[0, :count].copy()

    @property
    def seen(self) -> int:
        """Symbols so far."""
        return int(self._state[CLOCK])

    def __repr__(self) -> str:
        return f"Markov(order={self.config.order}, {self.seen} uses seen)"
