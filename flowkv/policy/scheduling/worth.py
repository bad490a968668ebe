"""Whether pages of a preempted request are worth keeping, by measured rates."""

from __future__ import annotations

from flowkv.policy.rates import Rates
from flowkv.policy.scheduling.job import Job

_MEMORY = 0.9
_APART = 1.5  # steps of about the same size say nothing about a further token


class Worth:
    """Compares two moves of a request's pages with computing them again.

    Pages that are kept cross the link twice. Pages that are dropped are computed again in steps
    that run anyway, for what a further token of a step takes. As long as one of these is unknown,
    pages are kept: no token is computed twice for want of knowledge.

    Args:
        page_bytes: Bytes of a page of all layer groups.

    Attributes:
        page_bytes: The same; whoever counts pages anew says what one has then.
        out: Rates of moves to host memory.
        back: Rates of moves to the device.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.out, self.back = Rates(), Rates()
        # Steps of many and of few tokens apart, or a while of decoding would make the former
        # forgotten: mean tokens and seconds.
        self._most = 0
        self._small: tuple[float, float] | None = None
        self._large: tuple[float, float] | None = None

    def step(self, tokens: int, seconds: float) -> None:
        """A step over so many tokens took so long."""
        if tokens <= 0 or seconds <= 0:
            return
        if tokens > 2 * self._most and self._large is not None:
            self._small, self._large = self._large, None
        self._most = max(self._most, tokens)
        if 2 * tokens > self._most:
            self._large = _mean(self._large, tokens, seconds)
        else:
            self._small = _mean(self._small, tokens, seconds)

    def moved(self, n_bytes: int, seconds: float, *, out: bool) -> None:
        """So many bytes went to host memory, or came back."""
        (self.out if out else self.back).add(n_bytes, seconds)

    def __call__(self, job: Job) -> bool:
        """Whether to keep the pages of a job that is to leave."""
        n_bytes, token_s = job.pages * self.page_bytes, self.token_s
        if not n_bytes or not token_s or not self.out.samples:
            return True
        back = self.back if self.back.samples else self.out
        moves_s = self.out.expected_s(n_bytes) + back.expected_s(n_bytes)
        return moves_s <= token_s * job.ready

    @property
    def token_s(self) -> float:
        """Seconds that a further token adds to a step; 0.0 while unknown."""
        if self._small is None or self._large is None:
            return 0.0
        (few, least_s), (many, most_s) = self._small, self._large
        if many < _APART * few:
            return 0.0
        return max(0.0, most_s - least_s) / (many - few)


def _mean(known: tuple[float, float] | None, tokens: int, seconds: float) -> tuple[float, float]:
    """Mean tokens and seconds, recent steps counting most."""
    if known is None:
        return float(tokens), seconds
    return (
        _MEMORY * known[0] + (1 - _MEMORY) * tokens,
        _MEMORY * known[1] + (1 - _MEMORY) * seconds,
    )
