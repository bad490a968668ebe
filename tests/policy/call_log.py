"""The calls that a driver made on a policy, written down, and made again on a fresh one.

What a policy decides follows from its calls alone. So what it decided in a live cache can be had
again elsewhere, looked at step by step, or compared with what another policy would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowkv import Lease, Policy
from flowkv.policy import Slots, Visit
from tests.inside import NO_VISIT, UNKNOWN_STOP


class PolicyCall(NamedTuple):
    """One call.

    Attributes:
        name: Of the method.
        arguments: By position; arrays as tuples of numbers.
        options: By name.
        answer: What the policy said, likewise.
    """

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    answer: Any


def logged_by(logs: list[CallLog], make: Callable[[], Policy]) -> Callable[[], CallLog]:
    """Return a maker of policies whose calls are written down, each in the next of these logs."""

    def made() -> CallLog:
        logs.append(CallLog(make()))
        return logs[-1]

    return made


class CallLog(Policy):
    """A policy that writes down what it is told, and lets another one decide.

    Args:
        inner: Decides.

    Attributes:
        calls: All calls that tell or decide something, in their order.
    """

    def __init__(self, inner: Policy) -> None:
        self.inner, self.name = inner, inner.name
        self.calls: list[PolicyCall] = []

    def insert(
        self,
        now_ns: int,
        slots: Slots,
        parents: Slots,
        *,
        n_bytes: int = 1,
        cost_ns: int = 0,
        lease: str | Lease = "",
        tenant: int = 0,
    ) -> None:
        more = {"n_bytes": n_bytes, "cost_ns": cost_ns, "lease": lease, "tenant": tenant}
        self._call("insert", now_ns, slots, parents, **more)

    def access(self, now_ns: int, slots: Slots, visit: Visit = NO_VISIT) -> None:
        self._call("access", now_ns, slots, visit)

    def remove(self, slots: Slots) -> None:
        self._call("remove", slots)

    def forget(self, slots: Slots) -> None:
        self._call("forget", slots)

    def complete(
        self, now_ns: int, request: int, *, stop: int = UNKNOWN_STOP, output_tokens: int = 0
    ) -> None:
        self._call("complete", now_ns, request, stop=stop, output_tokens=output_tokens)

    def abort(self, now_ns: int, request: int) -> None:
        self._call("abort", now_ns, request)

    def pin(self, slots: Slots) -> None:
        self._call("pin", slots)

    def unpin(self, slots: Slots) -> None:
        self._call("unpin", slots)

    def hint(self, now_ns: int, slots: Slots, eta_ns: int, sigma: float = 0.5) -> None:
        self._call("hint", now_ns, slots, eta_ns, sigma)

    def enqueue(self, now_ns: int, request: int, slots: Slots) -> None:
        self._call("enqueue", now_ns, request, slots)

    def invalidate(self, now_ns: int, tenant: int) -> None:
        self._call("invalidate", now_ns, tenant)

    def evict(self, now_ns: int, n: int, protected: Collection[int] = ()) -> Slots | None:
        victims: Slots | None = self._call("evict", now_ns, n, tuple(protected))
        return victims

    def displace(self, now_ns: int, n: int, rate: float, protected: Collection[int] = ()) -> Slots:
        victims: Slots = self._call("displace", now_ns, n, rate, tuple(protected))
        return victims

    def admit(self, now_ns: int, slots: Slots) -> NDArray[np.bool_]:
        admitted: NDArray[np.bool_] = self._call("admit", now_ns, slots)
        return admitted

    def expired(self, now_ns: int) -> Slots:
        run_out: Slots = self._call("expired", now_ns)
        return run_out

    def wanted(self, now_ns: int, n: int) -> tuple[Slots, NDArray[np.float64]]:
        found: tuple[Slots, NDArray[np.float64]] = self._call("wanted", now_ns, n)
        return found

    def priority(self, slot: int) -> float:
        return self.inner.priority(slot)

    def resident(self) -> Sequence[int]:
        return self.inner.resident()

    def digest(self) -> int:
        return self.inner.digest()

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        answer = getattr(self.inner, name)(*arguments, **options)
        self.calls.append(PolicyCall(name, tuple(map(_plain, arguments)), options, _plain(answer)))
        return answer


def repeat(calls: Sequence[PolicyCall], policy: Policy) -> list[PolicyCall]:
    """Makes calls again, on another policy.

    Args:
        calls: Of a `CallLog`.
        policy: A fresh one.

    Returns:
        The same calls with the answers that it gave.
    """
    log = CallLog(policy)
    for call in calls:
        arguments = (np.array(a, np.int64) if type(a) is tuple else a for a in call.arguments)
        getattr(log, call.name)(*arguments, **call.options)
    return log.calls


def _plain(value: Any) -> Any:
    """A value without arrays."""
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    return tuple(map(_plain, value)) if type(value) is tuple else value
