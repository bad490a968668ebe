"""A tokenizer of bytes with a chat template, for the model that ships with FlowKV."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from flowkv.data import tiny_path

PLAIN = (
    "{% if tools %}{% for t in tools %}tool {{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
STRICT = (  # roles alternate behind a system message, which goes into the first turn
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first, rest = '', messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{% if loop.first %}{{ first }}{% endif %}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LATEST = (  # earlier answers are shortened, as templates of models that think do
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and not loop.last %}..."
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def byte_tokenizer(template: str = PLAIN) -> Any:
    """Return a tokenizer whose ids are bytes."""
    known = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in known]
    signs = {byte: chr(byte) for byte in known} | {b: chr(256 + n) for n, b in enumerate(others)}
    made = Tokenizer(BPE({signs[byte]: byte for byte in range(256)}, []))
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), Bytes()
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)


def tiny_chat(folder: Path) -> Path:
    """Make a folder with the tiny model and its tokenizer."""
    shutil.copytree(tiny_path(), folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
