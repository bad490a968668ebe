"""What an engine can be told beside its model and cache, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from flowkv.core.errors import ConfigError, did_you_mean
from flowkv.core.sizes import parse_size
from flowkv.engine.numbers import is_number, whole
from flowkv.policy.scheduling import Scheduler, make_scheduler


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an engine.

    Attributes:
        scheduler: "fcfs", another name of `flowkv.policy.scheduling.SCHEDULERS`, or a `Scheduler`.
        scheduler_options: Arguments of the scheduler's class.
        max_rows: Most requests in one step.
        token_budget: Most tokens in one step; rows that decode come first, the rest is for prompts.
        watermark: Share of the device's pages that stays free when a request enters.
        max_waiting: Most requests that wait; `submit` refuses further ones.
        context_tokens: Most tokens of a request, its new ones included; default what the model and
            the device's pages allow.
        swap: Most host memory for pages of preempted requests, in bytes or as "4GiB".
        patience_s: Seconds that a request which is alone waits for pages that others than the
            engine hold, before it fails.
        seed: Of requests that have none.
        invariant: A request's tokens do not depend on the others to the last bit, at the cost of
            speed.

    Raises:
        ConfigError: A value is wrong.
    """

    scheduler: str | Scheduler = "fcfs"
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    max_rows: int = 32
    token_budget: int = 512
    watermark: float = 0.02
    max_waiting: int = 1024
    context_tokens: int | None = None
    swap: int | str = "4GiB"
    patience_s: float = 1.0
    seed: int = 0
    invariant: bool = False

    def __post_init__(self) -> None:
        for name in ("max_rows", "token_budget", "max_waiting"):
            whole(name, getattr(self, name), 1)
        if self.context_tokens is not None:
            whole("context_tokens", self.context_tokens, 2)
        if self.token_budget < self.max_rows:
            raise ConfigError(
                f"token_budget={self.token_budget} for {self.max_rows} rows, which decode one "
                "token each",
                "Raise token_budget, or lower max_rows",
            )
        if not is_number(self.watermark) or not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark={self.watermark!r}", "Use a share from 0 to less than 1")
        if not is_number(self.patience_s) or not self.patience_s >= 0.0:
            raise ConfigError(f"patience_s={self.patience_s!r}", "Use seconds, 0 or more")
        whole("seed", self.seed)
        parse_size(self.swap)
        self.order()

    @property
    def swap_bytes(self) -> int:
        """Most host memory for pages of preempted requests."""
        return parse_size(self.swap)

    def order(self) -> Scheduler:
        """The scheduler."""
        return make_scheduler(self.scheduler, **self.scheduler_options)


def make_settings(**given: Any) -> Settings:
    """Settings from keywords.

    Raises:
        ConfigError: A name or value is wrong.
    """
    names = [one.name for one in fields(Settings)]
    for name in given:
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(
                f"an engine has no setting {name!r}", f"{hint}Use one of {', '.join(names)}"
            )
    return Settings(**given)
