"""Two replicas of FlowKV's engine on a local Ray: what first tokens take under a way of routing.

    python -m bench.engines.replicas prefix|round SHARED|- [SEED]

Clients ask questions about documents, one token each, two at a time. A line of JSON says how long.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter

from flowkv.connect.ray import PrefixRouter, ask, event_address

DOCUMENTS, QUESTIONS, CLIENTS, TOKENS = 8, 8, 2, 2_400


class RoundRobin(RequestRouter):
    """One after the other."""

    def initialize_state(self) -> None:
        self._turn = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        found = sorted(candidate_replicas, key=lambda one: str(one.replica_id))
        first = next(self._turn) % len(found)
        return [[one] for one in found[first:] + found[:first]]


class Replica:
    """The engine over the fixture, whose tokens are bytes."""

    def __init__(self, shared: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        import flowkv
        from flowkv.connect.events import EventPublisher
        from flowkv.data import tiny_path

        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
        tiers = ["gpu:256MiB", *([shared] if shared else [])]
        self.kv = flowkv.attach(model, tiers=tiers)
        self.engine = flowkv.Engine(model, self.kv)
        self.events = EventPublisher(self.kv, "tcp://*:*", replay="tcp://*:*")

    async def __call__(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        done = await self.engine.submit(prompt, **fields)
        return {"tokens": done.tokens, "reused": done.reused_tokens}

    def record_routing_stats(self) -> dict[str, str]:
        return event_address(self.events)


async def main(router: str, shared: str, seed: int) -> None:
    routing: dict[str, Any] = {"request_router_class": RoundRobin}
    if router == "prefix":
        rates = {"compute": 4_000.0, "fetch": 40_000.0 if shared else 0.0}
        routing = {"request_router_class": PrefixRouter, "request_router_kwargs": rates}
    deployment = serve.deployment(
        num_replicas=2,
        ray_actor_options={"num_cpus": 0.5},
        request_router_config=RequestRouterConfig(**routing, request_routing_stats_period_s=1.0),
    )(Replica)
    handle = serve.run(deployment.bind(shared))
    await asyncio.sleep(3.0)
    dice = random.Random(seed)
    warm = [list(f"{dice.random()} ".encode() * (TOKENS // 20)) for _ in range(8)]
    await asyncio.gather(*(ask(handle, one, max_new_tokens=1) for one in warm))
    documents = [list(dice.randbytes(TOKENS)) for _ in range(DOCUMENTS)]
    wishes = [(d, q) for d in range(DOCUMENTS) for q in range(QUESTIONS)]
    dice.shuffle(wishes)
    took, reused = list[float](), list[int]()

    async def client() -> None:
        while wishes:
            document, question = wishes.pop()
            prompt = documents[document] + list(b"Question %d?" % question)
            begun_s = time.perf_counter()
            found = await ask(handle, prompt, max_new_tokens=1)
            took.append(time.perf_counter() - begun_s)
            reused.append(found["reused"])

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    said = {"ttft_s": sum(took) / len(took), "reused": sum(reused), "answers": len(took)}
    print("SAYS " + json.dumps(said), flush=True)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    place = "" if sys.argv[2] == "-" else sys.argv[2]
    asyncio.run(main(sys.argv[1], place, int(sys.argv[3]) if sys.argv[3:] else 1))
    serve.shutdown()
