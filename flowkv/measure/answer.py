"""Prompts from a file, answered one after the other, with what was reused for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.measure.generate import Reuse, timed_generate


class Answer(msgspec.Struct, kw_only=True):
    """One prompt and what became of it.

    Attributes:
        prompt: Its text.
        answer: The text that continues it.
        prompt_tokens: Its tokens.
        tokens_reused: Those that were not computed.
        new_tokens: Tokens of the answer.
        ttft_s: From the call to the first token; the first call of a process also compiles.
        tpot_s: Mean time per further token.
    """

    prompt: str
    answer: str
    prompt_tokens: int
    tokens_reused: int
    new_tokens: int
    ttft_s: float
    tpot_s: float


def answer_all(
    loaded: Any, kv: Any, prompts: Sequence[str], *, max_new_tokens: int
) -> Iterator[Answer]:
    """Answers greedily, in order.

    Args:
        loaded: A model with `encode` and `decode` (`flowkv.hooks.huggingface.load.Loaded`).
        kv: The `KV` that is attached to it.
        prompts: Texts.
        max_new_tokens: Most new tokens of an answer.

    Raises:
        ConfigError: A prompt is empty once it is tokens.
    """
    for prompt in prompts:
        tokens = loaded.encode(prompt)
        before = Reuse.of(kv)
        timing = timed_generate(loaded.model, [tokens], max_new_tokens=max_new_tokens)
        (new,) = timing.answers
        yield Answer(
            prompt=prompt,
            answer=loaded.decode(new),
            prompt_tokens=len(tokens),
            tokens_reused=Reuse.of(kv).since(before).reused,
            new_tokens=len(new),
            ttft_s=timing.ttft_s,
            tpot_s=timing.tpot_s,
        )


def read_prompts(name: str) -> list[str]:
    r"""Prompts of a file: one per line, or JSON lines with {"prompt": "..."}.

    Args:
        name: The file; "-" for standard input. It is read as JSON lines if it ends in ".jsonl", or
            if its first line is a JSON object.

    Raises:
        ConfigError: It cannot be read, holds no prompt, or a line is malformed.
    """
    lines = [(i, line) for i, line in enumerate(_text(name).splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{name} holds no prompt", "Write one per line")
    if name.endswith(".jsonl") or isinstance(_parsed(lines[0][1]), dict):
        return [_prompt(name, number, line) for number, line in lines]
    return [line for _, line in lines]


def _text(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        return data.decode()
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read ({error.strerror or error})", "Correct the path of the prompts"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start})", "Save the prompts as UTF-8"
        ) from error


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _prompt(name: str, number: int, line: str) -> str:
    found = _parsed(line)
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(
            f"line {number} of {name} is no JSON object with a text `prompt`",
            'Write {"prompt": "..."} on every line',
        )
    return prompt
