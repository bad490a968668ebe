"""`Markov` as written down, slowly: dicts and lists, nothing ever replaced in the table."""

from __future__ import annotations

from dataclasses import dataclass, field

LEAST, TRUST, UNSEEN, UNLIKELY = 1 / 64, 1 / 256, 1 / 65536, 0.01


@dataclass
class Row:
    width: int
    visits: int = 0
    symbols: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.symbols, self.shares = [0] * self.width, [0.0] * self.width

    def share(self, symbol: int) -> float:
        shares = zip(self.symbols, self.shares, strict=True)
        return next((p for x, p in shares if p > 0 and x == symbol), 0.0)

    def follow(self, symbol: int, memory: int) -> None:
        self.visits += 1
        step = 1.0 / min(self.visits, memory)
        self.shares = [p * (1.0 - step) for p in self.shares]
        known = [k for k in range(self.width) if self.shares[k] > 0 and self.symbols[k] == symbol]
        at = known[-1] if known else min(range(self.width), key=lambda k: self.shares[k])
        self.symbols[at] = symbol
        self.shares[at] += step


class SlowMarkov:
    def __init__(self, order: int = 3, successors: int = 16, memory: int = 128) -> None:
        self.order, self.width, self.memory = order, successors, memory
        self.rows: dict[tuple[int, ...], Row] = {}
        self.trust: dict[tuple[int, int], float] = {}
        self.past: list[int] = []

    def context(self, past: list[int], order: int) -> Row | None:
        return self.rows.get(tuple(past[len(past) - order :])) if len(past) >= order else None

    def weight(self, order: int, row: Row) -> float:
        return self.trust.get((order, min(row.visits.bit_length() - 1, 7)), 0.5)

    def observe(self, stream: list[int]) -> None:
        for x in stream:
            below = UNSEEN
            for order in range(min(self.order, len(self.past)) + 1):
                past = tuple(self.past[len(self.past) - order :])
                row = self.rows.setdefault(past, Row(self.width))
                if row.visits:
                    weight = self.weight(order, row)
                    mine = weight * row.share(x)
                    below = mine + (1.0 - weight) * below
                    learned = weight + TRUST * (mine / below - weight)
                    key = order, min(row.visits.bit_length() - 1, 7)
                    self.trust[key] = min(max(learned, LEAST), 1.0 - LEAST)
                row.follow(x, self.memory)
            self.past.append(x)

    def next(self, past: list[int]) -> dict[int, float]:
        scores, rest = dict[int, float](), 1.0
        for order in range(min(self.order, len(past)), -1, -1):
            row = self.context(past, order)
            if row is None or not row.visits:
                continue
            weight = rest * self.weight(order, row)
            for x, p in zip(row.symbols, row.shares, strict=True):
                if p > 0:
                    scores[x] = scores.get(x, 0.0) + weight * p
            rest -= weight
        return scores

    def predict(self, n: int, steps: int = 1, beam: int = 8) -> list[tuple[int, float]]:
        total, beams = dict[int, float](), [(self.past, 1.0)]
        for _ in range(steps):
            after = list[tuple[list[int], float]]()
            for past, chance in beams:
                scores = {x: p * chance for x, p in self.next(past).items()}
                for x, p in scores.items():
                    total[x] = total.get(x, 0.0) + p
                for x, p in sorted(scores.items(), key=lambda one: (-one[1], one[0]))[:beam]:
                    after += [([*past, x], p)] if p > UNLIKELY else []
            beams = sorted(after, key=lambda one: -one[1])[:beam]
        return sorted(total.items(), key=lambda one: (-one[1], one[0]))[:n]
