"""Many users, one model: nobody finds the pages of another, and each has a quota.

python examples/tenants.py
"""

import torch
from transformers import AutoModelForCausalLM, __version__

import flowkv
from flowkv.data import tiny_path  # a trained model that comes with FlowKV; its tokens are bytes

MIB = 1 << 20
CACHE = "past_key_values" if __version__ < "5.24" else "cache"  # transformers renamed it
model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
kv = flowkv.attach(
    model,
    gpu="16MiB",
    # "reserve:limit": others never push alice below 4 MiB, and the crawler never keeps over 2 MiB
    quotas={"alice": "4MiB:8MiB", "crawler": ":2MiB"},
)


def ask(tenant: str, text: str) -> str:
    """Answers one request of a tenant, and says how much of it was known."""
    prompt = torch.tensor([list(text.encode())])
    before = kv.stats()["tokens_reused"]
    cache = kv.cache(input_ids=prompt, tenant=tenant)
    model.generate(prompt, **{CACHE: cache}, max_new_tokens=8, do_sample=False)
    reused = kv.stats()["tokens_reused"] - before
    return f"{reused} of {prompt.shape[1]} tokens were known"


contract = "def settle(account, amount):\n    return account.balance - amount\n" * 10
print("alice asks:           ", ask("alice", contract))
print("alice asks again:     ", ask("alice", contract))
print("bob asks the same:    ", ask("bob", contract))
for page in range(20):  # far more than fits: it takes its own pages' room, and nobody else's
    ask("crawler", f"# page {page}\n" + contract)
print("after a crawler, alice:", ask("alice", contract))

held = kv.stats()["policies"]["cpu"]["quotas"]
for tenant, usage in held.items():
    print(f"{tenant} holds {usage['used_bytes'] / MIB:.1f} MiB of the device pool")

kv.forget(tenant="alice")  # on every tier; an error if one of them cannot prove it
print("alice, forgotten:     ", ask("alice", contract))
kv.close()
