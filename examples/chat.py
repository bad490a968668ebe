"""A chat that remembers over restarts: each run is a new process, and adds one turn.

python examples/chat.py "def push(self, item):"
python examples/chat.py "def pop(self):"

The words of the conversation lie in ./chat.txt, what the model computed for them in ./kv. The model
here is tiny and knows only Python, so what it is told, and what it answers, is code.
"""

import inspect
import queue
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import flowkv
from flowkv.data import tiny_path  # a trained model that comes with FlowKV; its tokens are bytes

history = Path("chat.txt")
said = history.read_text() if history.exists() else inspect.getsource(queue)[:1500]
text = f"{said}\n    {sys.argv[1] if len(sys.argv) > 1 else 'def push(self, item):'}\n"

model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
kv = flowkv.attach(model, disk="./kv:256MiB")  # the only line that has to do with FlowKV
prompt = torch.tensor([list(text.encode())])  # with a tokenizer: tokenizer(text, ...).input_ids

begun_s = time.perf_counter()
output = model.generate(prompt, max_new_tokens=60, do_sample=False)
took_s = time.perf_counter() - begun_s

answer = bytes(output[0, prompt.shape[1] :].tolist()).decode(errors="replace")
reused = kv.stats()["tokens_reused"]
kv.close()  # what is not on disk yet is written
history.write_text(text + answer)

print(answer)
print(f"-- {prompt.shape[1]} tokens of history, {reused} of them remembered, {took_s:.2f} s")
