"""Two processes share a host tier: what one has computed, the other does not compute.

python examples/two_processes.py

It starts itself twice. In real life the two are workers that somebody else starts, and only the
name in `host:NAME:SIZE` is common to them.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import flowkv
from flowkv.data import tiny_path  # a trained model that comes with FlowKV; its tokens are bytes


def work(who: str, name: str) -> None:
    """One worker: asks once, says how much it found."""
    model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    kv = flowkv.attach(model, tiers=["gpu:16MiB", f"host:{name}:64MiB"])
    system = "import os\nimport sys\n\n\nclass Stack:\n    def push(self, item):\n" * 20
    prompt = torch.tensor([list(f"{system}# for the {who} worker\n".encode())])
    begun_s = time.perf_counter()
    model.generate(prompt, max_new_tokens=1, do_sample=False)
    took_ms = 1e3 * (time.perf_counter() - begun_s)
    found = kv.stats()["tokens_reused"]
    print(f"{who} worker: {found} of {prompt.shape[1]} tokens found, {took_ms:.0f} ms")
    kv.close()  # its full pages are in shared memory by now


if len(sys.argv) > 1:
    work(*sys.argv[1:])
else:
    name = f"example-{os.getpid()}"
    try:
        for who in ("first", "second"):
            subprocess.run([sys.executable, __file__, who, name], check=True)
    finally:  # it outlives its processes: deleting its files gives the memory back
        for file in Path("/dev/shm").glob(f"flowkv-{os.getuid()}-{name}*"):
            file.unlink()
