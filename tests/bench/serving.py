"""Models and engines that answer at once, so that what is measured of them is known."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from bench.serve.ground import Setting
from flowkv import Completion
from tests.inside import Bus, EngineStep


class Echo:
    """A model whose tokens follow from the prompt alone, padding aside."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(
        self,
        ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor,
        max_new_tokens: int,
        do_sample: bool,
        streamer: Any,
    ) -> torch.Tensor:
        assert not do_sample and attention_mask.shape == ids.shape
        self.batches.append(len(ids))
        streamer.put(ids)
        first = (ids * attention_mask).sum(1)
        for step in range(max_new_tokens):
            token = ((first + step) % 256)[:, None]
            ids = torch.cat([ids, token], 1)
            streamer.put(token)
        streamer.end()
        return ids


class EchoEngine:
    """An engine that answers at once what `Echo` answers.

    Args:
        bus: Told of a step for each request.
        ttft_s: That it claims.
        wrong: Whether its tokens are others.
    """

    def __init__(self, bus: Bus, ttft_s: float = 0.5, *, wrong: bool = False) -> None:
        self.bus, self.ttft_s, self.wrong = bus, ttft_s, wrong
        self.tenants: list[str | None] = []
        self.prompts: list[list[int]] = []
        self.most = self.open = 0

    def submit(self, prompt: list[int], **fields: Any) -> Future[Completion]:
        self.tenants.append(fields["tenant"])
        self.prompts.append(prompt)
        self.open += 1
        self.most = max(self.most, self.open)
        self.bus.emit(a_step(pages=3, total_pages=4))
        answer: Future[Completion] = Future()
        new = fields["max_new_tokens"]
        tokens = [(sum(prompt) + n + self.wrong) % 256 for n in range(new)]
        done = Completion(
            tokens=tokens,
            reason="length",
            prompt_tokens=len(prompt),
            reused_tokens=2,
            ttft_s=self.ttft_s,
            tpot_s=0.25,
            preempted=1,
        )
        self.open -= 1
        answer.set_result(done)
        return answer


class EchoGround:
    """A ground of those.

    Args:
        wrong: Whether its engines answer wrongly.
    """

    name, context, vocabulary, pool_bytes = "echo", 4096, 256, 1 << 20

    def __init__(self, *, wrong: bool = False) -> None:
        self.model, self.wrong = Echo(), wrong
        self.made: list[Setting] = []
        self.engines: list[EchoEngine] = []
        self.left = 0

    @contextmanager
    def engine(
        self, setting: Setting, *, positions: int = 0, copy: Any = None
    ) -> Iterator[tuple[Any, Any]]:
        bus = Bus()
        engine = EchoEngine(bus, 0.5 * setting.page_size / 64, wrong=self.wrong)
        self.made.append(setting)
        self.engines.append(engine)
        yield engine, SimpleNamespace(bus=bus)
        self.left += 1


def a_step(**told: Any) -> EngineStep:
    given = {
        **{"rows": 1, "prefill_tokens": 0, "decode_tokens": 1, "made_tokens": 1, "waiting": 0},
        **{"aside": 0, "pages": 0, "total_pages": 1, "started_s": 0.0, "seconds": 0.0},
        **{"model_s": 0.0, "sampling_s": 0.0},
    }
    return EngineStep(**{**given, **told})
