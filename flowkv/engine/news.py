"""What an engine tells the bus. Events are made only if somebody listens."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from typing import NamedTuple

from flowkv.engine.failure import Part
from flowkv.engine.live import Live
from flowkv.engine.request import Completion
from flowkv.observe.events import Bus, EngineStep, Finished, Queued
from flowkv.policy.scheduling import ASIDE, Room


class Times(NamedTuple):
    """When the parts of a step began and ended, in seconds of `time.perf_counter`.

    Attributes:
        began_s: The turn began.
        forward_s: The forward began.
        sampling_s: The choice of tokens began.
        chosen_s: It was over.
    """

    began_s: float
    forward_s: float
    sampling_s: float
    chosen_s: float


class News:
    """Tells the bus of an engine.

    Args:
        bus: Told.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    @property
    def steps(self) -> bool:
        """Whether anybody wants to know of steps."""
        return self._bus.wants(EngineStep)

    def queued(self, live: Live, waiting: int) -> None:
        """A request was taken in; so many wait now. Told in the context of its submission."""
        context, live.context = live.context, None
        if self._bus.wants(Queued):
            event = Queued(
                request=live.number,
                prompt_tokens=live.prompt,
                waiting=waiting,
                tenant=live.request.tenant or "",
            )
            if context is None:
                self._bus.emit(event)
            else:
                context.run(self._bus.emit, event)

    def step(
        self,
        done: Items[Part],
        made: int,
        gaps: list[float],
        times: Times,
        waiting: Items[Live],
        room: Room,
    ) -> None:
        """A step is over.

        Args:
            done: What was computed.
            made: New tokens.
            gaps: Seconds since their last token, of the rows that made a further one.
            times: When it did what.
            waiting: Who waits now.
            room: Pages when all was computed, before rows that were over gave back theirs.
        """
        tokens, aside = sum(count for _, count in done), _aside(waiting)
        self._bus.emit(
            EngineStep(
                rows=len(done),
                prefill_tokens=tokens - len(gaps),
                decode_tokens=len(gaps),
                made_tokens=made,
                waiting=len(waiting) - aside,
                aside=aside,
                pages=room.total - room.free,
                total_pages=room.total,
                started_s=times.began_s,
                seconds=time.perf_counter() - times.began_s,
                model_s=times.sampling_s - times.forward_s,
                sampling_s=times.chosen_s - times.sampling_s,
                gaps_s=tuple(gaps),
            )
        )

    def finished(self, live: Live, completion: Completion, reason: str) -> None:
        """A request is over."""
        if self._bus.wants(Finished):
            self._bus.emit(
                Finished(
                    request=live.number,
                    reason=reason,
                    prompt_tokens=completion.prompt_tokens,
                    reused_tokens=completion.reused_tokens,
                    new_tokens=len(completion.tokens),
                    started_s=live.arrived_s,
                    seconds=completion.seconds,
                    queued_s=completion.queued_s,
                    ttft_s=completion.ttft_s,
                    tpot_s=completion.tpot_s,
                    preempted=completion.preempted,
                    restore_s=completion.restore_s,
                    exposed_s=completion.exposed_s,
                    tenant=live.request.tenant or "",
                )
            )


def _aside(waiting: Items[Live]) -> int:
    return sum(live.state == ASIDE for live in waiting)
