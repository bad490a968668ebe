"""Decayed frequency with leases: keeps what is used often, forgets what may not stay."""

from __future__ import annotations

from flowkv.policy.config import LfuTtlConfig, configure
from flowkv.policy.order.leaf import LeafOrder


class LfuTtl(LeafOrder):
    """Gives up, among the leaves, expired blocks first and then the least frequently used.

    *Frequency.* An access counts 1 and halves every `tau_s` seconds: c <- 1 + c * 2^(-dt/tau), the
    "combined recency and frequency" of LRFU (Lee et al., IEEE ToC 2001), kept as one static integer
    key. tau -> 0 is LRU, large tau is LFU. The count of a block outlives its residence until
    `forget`. Prefix hit ratio in replays of published traces, at 1 % of all blocks:

    | trace | LRU | tau 5 s | tau 15 s | tau 120 s |
    |---|---|---|---|---|
    | coding agents | .494 | .504 | .550 | .553 |
    | chat | .052 | .053 | .054 | .101 |
    | short agent runs | .489 | .477 | .412 | .227 |

    So the default is short; a half-life that does not fit costs more than a fitting one earns.

    *Leases.* A block expires at min(last access + lease, birth + max age) of its class, a parent
    not before its resident children. Expired blocks are reclaimed before any live one; no access
    revives them, only `insert` does, which begins a new life (an expired parent is no parent).
    Leases are for privacy, staleness and giving memory back. They do not raise the hit ratio,
    ageing does; a *short* lease after tool calls lowered it by ten points.

    Classes: "" (the default class), "turn_end", "tool_wait", "pinned_prefix", "one_shot",
    "ephemeral", and those of `leases=`. See `LfuTtlConfig` for their values.

    Args:
        **options: Fields of `LfuTtlConfig`.

    Raises:
        ConfigError: If an option is unknown or out of range.
    """

    name = "lfu-ttl"
    config: LfuTtlConfig

    def __init__(self, **options: object) -> None:
        self.config = configure(LfuTtlConfig, self.name, options)
        super().__init__(round(self.config.tau_s * 1e9), self.config)
