"""Many requests at once: the engine batches them at every step, and answers stream.

python examples/serve.py

It opens no port: in a web server, `stream` below is the body of a handler.
"""

import asyncio
import time

import torch
from transformers import AutoModelForCausalLM

import flowkv
from flowkv.data import tiny_path  # a trained model that comes with FlowKV; its tokens are bytes

model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
kv = flowkv.attach(model, gpu="16MiB", host="32MiB", disk="./kv:128MiB")
system = b"import os\nimport sys\n\n\nclass Stack:\n    def push(self, item):\n" * 8


async def stream(engine: flowkv.Engine, number: int, new_tokens: int) -> flowkv.Completion:
    """One client: gets its tokens as they come."""
    prompt = list(system + b"# client %d\n" % number)
    answer = engine.submit(prompt, max_new_tokens=new_tokens, deadline_s=120.0)
    async for _token in answer:
        pass  # send it to the client
    return await answer


async def main() -> None:
    """Sixteen clients at once."""
    with flowkv.Engine(model, kv, scheduler="shortest", max_rows=8) as engine:
        await stream(engine, 0, 4)  # the first one compiles kernels, and fills the cache
        begun_s = time.perf_counter()
        clients = [stream(engine, number, 8 + 4 * (number % 4)) for number in range(1, 17)]
        answers = await asyncio.gather(*clients)
        took_s = time.perf_counter() - begun_s
    for number, done in enumerate(answers, 1):
        known = f"{done.reused_tokens} prompt tokens known"
        print(f"client {number:2}: {len(done.tokens):2} tokens, {known}, ended by {done.reason}")
    tokens = sum(len(done.tokens) for done in answers)
    print(f"{len(answers)} clients, {tokens} tokens in {took_s:.1f} s")


asyncio.run(main())
kv.close()
