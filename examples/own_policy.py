"""A policy of one's own: written, checked, judged and used, in one file.

python examples/own_policy.py
"""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import flowkv
from flowkv.data import tiny_path  # a trained model that comes with FlowKV; its tokens are bytes
from flowkv.policy.by_score import ByScore, Use
from flowkv.sim import generate, replay
from flowkv.testing import check_policy  # pip install 'flowkv[testing]'


class Lru2(ByScore):
    """LRU-2 (O'Neil et al., SIGMOD 1993): what was used only once goes first."""

    name = "lru-2"

    def score(self, now_ns: int, use: Use) -> np.ndarray:
        """What each block is worth until its next use: when it was used before the last time."""
        return np.where(use.uses == 1, -np.inf, use.before_ns)


check_policy(Lru2, max_examples=10)
print("lru-2 keeps every rule of a policy")

trace = generate("agents", requests=300, seed=1)  # or flowkv.sim.read_trace(...) of your own
for policy in ("lru", Lru2, "auto", "opt"):  # opt knows the future: nothing can be better
    result = replay(trace, policy, size="5%")
    print(f"{result.policy:8} finds {result.prefix_hit_ratio:.1%} of the prompts' blocks")

model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
kv = flowkv.attach(model, gpu="8MiB", policy=Lru2)
for number in (1, 2, 1, 3, 1):
    text = f"# prompt {number}\n" + "import os\nimport sys\n\n\nclass Stack:\n" * 10
    prompt = torch.tensor([list(text.encode())])
    model.generate(prompt, max_new_tokens=4, do_sample=False)
print(f"in a cache, {kv.stats()['policies']['cpu']['name']} decides: {kv}")
kv.close()
