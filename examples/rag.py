"""Questions about documents: what was read for one question is not read again for the next.

python examples/rag.py

Each prompt is instruction, document, question, in this order: what prompts have in common stands in
front, where a prefix can be reused. Run it again and the first questions are served from disk, too.
"""

import inspect
import queue
import shutil
import textwrap

import torch
from transformers import AutoModelForCausalLM

import flowkv
from flowkv.data import tiny_path  # a trained model that comes with FlowKV; its tokens are bytes

documents = {m.__name__: inspect.getsource(m)[:1800] for m in (queue, shutil, textwrap)}
questions = [
    "how do I wrap text to a width?",
    "how do I copy a file?",
    "which exception does a full queue raise?",
    "what does text with tabs become?",
    "how do I copy a file with its metadata?",
    "is a queue safe between threads?",
]


def retrieve(question: str) -> str:
    """The document that shares most words with the question."""
    words = {word.strip("?") for word in question.split() if len(word) > 3}
    return max(documents, key=lambda name: sum(map(documents[name].lower().count, words)))


model = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
kv = flowkv.attach(model, disk="./kv:256MiB")
for question in questions:
    name = retrieve(question)
    text = f"# Answer from the source below.\n{documents[name]}\n# {question}\n"
    prompt = torch.tensor([list(text.encode())])
    before = kv.stats()["tokens_reused"]
    model.generate(prompt, max_new_tokens=16, do_sample=False)
    reused = kv.stats()["tokens_reused"] - before
    print(f"{question:42} {name:9} {reused:4} of {prompt.shape[1]} tokens were known")
kv.close()
