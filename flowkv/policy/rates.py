"""How fast a place is: latency and bandwidth, estimated from what its transfers took."""

from __future__ import annotations

_MEMORY = 0.8
_SPREAD = 1e-6
_ENOUGH = 8
_LEAST_S, _TIMES = 1.0, 20.0


class Rates:
    """Seconds of a transfer as `latency_s + n_bytes / bytes_per_s`, recent samples counting most.

    A least-squares line through the samples, each weighing 0.8 of the next one. While all samples
    are of one size, latency and bandwidth cannot be told apart, and all goes to the bandwidth.

    Attributes:
        samples: Transfers seen so far.
    """

    __slots__ = ("_sn", "_sx", "_sxx", "_sxy", "_sy", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self._sn = self._sx = self._sy = self._sxx = self._sxy = 0.0

    def add(self, n_bytes: int, seconds: float) -> None:
        """A transfer of `n_bytes` took `seconds`; one of no bytes or no time says nothing."""
        if n_bytes > 0 and seconds > 0:
            self.samples += 1
            self._sn = self._sn * _MEMORY + 1
            self._sx = self._sx * _MEMORY + n_bytes
            self._sy = self._sy * _MEMORY + seconds
            self._sxx = self._sxx * _MEMORY + n_bytes * n_bytes
            self._sxy = self._sxy * _MEMORY + n_bytes * seconds

    def doubt(self, factor: float) -> None:
        """Scales what is believed about its times."""
        self._sy *= factor
        self._sxy *= factor

    @property
    def latency_s(self) -> float:
        """Seconds before the first byte; 0 while nothing is known."""
        return self._line()[0]

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth; 0 while nothing is known."""
        slope = self._line()[1]
        return 1 / slope if slope else self._sx / self._sy if self._sy else 0.0

    def expected_s(self, n_bytes: int) -> float:
        """Seconds that a transfer of so many bytes should take; 0 while nothing is known."""
        latency, slope = self._line()
        return latency + n_bytes * slope

    def patience_s(self, n_bytes: int, most_s: float) -> float:
        """How long to wait for such a transfer: many times what it should take, not over `most_s`.

        Before some samples were seen, that is `most_s`.
        """
        if self.samples < _ENOUGH:
            return most_s
        return min(most_s, _LEAST_S + _TIMES * self.expected_s(n_bytes))

    def _line(self) -> tuple[float, float]:
        """Seconds before the first byte, and seconds for each."""
        if not self._sx:
            return 0.0, 0.0
        spread = self._sn * self._sxx - self._sx * self._sx
        if spread <= _SPREAD * self._sn * self._sxx:
            return 0.0, self._sy / self._sx
        slope = max(0.0, (self._sn * self._sxy - self._sx * self._sy) / spread)
        latency = (self._sy - slope * self._sx) / self._sn
        return (latency, slope) if latency >= 0 else (0.0, self._sy / self._sx)
