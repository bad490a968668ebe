"""Requests, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from flowkv.core.keys import Salt
from flowkv.policy.config import Lease
from flowkv.runtime.opening import Tokens
from flowkv.runtime.retention import Retain

Reason = Literal["stop", "length", "cancelled", "deadline"]
"""Why a completion ended: by itself; at `max_new_tokens`; called off; too late."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an engine is asked to continue.

    Attributes:
        prompt: Token ids.
        max_new_tokens: Most new tokens, at least 1.
        priority: Larger is more urgent; read by `scheduler="priority"`.
        deadline_s: Seconds after submission at which it is of no use any more.
        seed: Of sampling; None takes one from the engine. What is drawn depends on it alone.
        options: How tokens are chosen, as `generate` of the model takes it (`do_sample`,
            `temperature`, `top_p`, `repetition_penalty`, `eos_token_id`, `stopping_criteria`, ...).
        tenant: See `KV.open`.
        session: See `KV.open`.
        lease: See `KV.open`.
        retain: See `KV.open`.
        salts: See `KV.open`.
    """

    prompt: Tokens
    max_new_tokens: int = 128
    priority: int = 0
    deadline_s: float | None = None
    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    tenant: str | None = None
    session: str | int | None = None
    lease: str | Lease = ""
    retain: tuple[Retain, ...] = ()
    salts: tuple[Salt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of a request.

    Attributes:
        tokens: The new tokens.
        reason: Why it ended.
        prompt_tokens: Tokens of its prompt.
        reused_tokens: Those of them that were not computed.
        queued_s: From submission until it was first admitted.
        ttft_s: From submission to the first new token; 0.0 if there was none.
        tpot_s: Mean time of a further token; 0.0 if there was none.
        seconds: From submission to the end.
        preempted: How often it made room for others.
        restore_s: From the beginning of the load of its prefix to its end.
        exposed_s: The part of that in which nothing of it was computed.
    """

    tokens: list[int]
    reason: Reason
    prompt_tokens: int
    reused_tokens: int = 0
    queued_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    seconds: float = 0.0
    preempted: int = 0
    restore_s: float = 0.0
    exposed_s: float = 0.0
