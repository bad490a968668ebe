"""`flowkv generate`: answers prompts of a file with a store on disk."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

import flowkv
from flowkv.cli.arguments import (
    AddVerb,
    count,
    load_model,
    model_arguments,
    read_text,
    trace_argument,
)
from flowkv.core.config import load_config
from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED
from flowkv.report.screen import Screen, one_line
from flowkv.report.words import seconds


def add_verb(verb: AddVerb) -> None:
    """Add the verb `generate`."""
    parser = verb("generate", _generate, "answer prompts with a store on disk")
    model_arguments(parser, required=True)
    about = 'a prompt per line, or JSON lines with {"prompt": ...}; - for standard input'
    parser.option("--prompts", "FILE", about, required=True)
    parser.option("--store", "DIR[:SIZE]", "made if need be", required=True)
    parser.option("--max-new-tokens", "N", "default %(default)s", type=count, default=64)
    trace_argument(parser)


def _generate(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    prompts = read_prompts(given.prompts)
    load_config(disk=given.store)
    loaded = load_model(given, screen)
    from flowkv.demo.timing import Reuse, timed_generate

    answers = []
    with contextlib.ExitStack() as stack:
        kv = flowkv.attach(loaded.model, disk=given.store)
        stack.callback(kv.close)
        if given.trace:
            stack.enter_context(kv.trace(given.trace))
        for number, prompt in enumerate(prompts, 1):
            tokens, before = loaded.encode(prompt), Reuse.of(kv)
            timing = timed_generate(loaded.model, [tokens], max_new_tokens=given.max_new_tokens)
            (new,) = timing.answers
            answer: dict[str, Any] = {
                "prompt": prompt,
                "answer": loaded.decode(new),
                "prompt_tokens": len(tokens),
                "tokens_reused": Reuse.of(kv).since(before).reused,
                "new_tokens": len(new),
                "ttft_s": timing.ttft_s,
                "tpot_s": timing.tpot_s,
            }
            answers.append(answer)
            screen.say(f"{number}. {one_line(prompt)}", style="bold")
            screen.say(answer["answer"])
            reused = f"{answer['tokens_reused']:,} of {len(tokens):,} tokens reused"
            screen.say(f"{reused}, first token after {seconds(timing.ttft_s)}\n", style="dim")
        kv.flush()
        stats = kv.stats()
    result = {name: stats[name] for name in ("tokens_reused", "hit_rate", "tiers")}
    return 0, {"answers": answers, **result, "device": str(loaded.model.device)}


def read_prompts(name: str) -> list[str]:
    r"""Return the prompts of a file: one per line, or JSON lines with {"prompt": "..."}.

    Lines end with "\n" or "\r\n", not with any other line end of Unicode; a byte order mark before
    the first one is left out.

    Args:
        name: The file; "-" for standard input. The file is read as JSON lines if its name ends in
            ".jsonl", or if its first line is a JSON object.

    Raises:
        ConfigError: The file cannot be read, has no prompt, or a line is malformed.
    """
    every = enumerate(read_text(name).replace("\r\n", "\n").split("\n"), 1)
    lines = [(number, line) for number, line in every if line.strip()]
    if not lines:
        raise ConfigError(f"{name} holds no prompt", "Write one per line")
    if name.endswith(".jsonl") or isinstance(_parsed(lines[0][1]), dict):
        return [_prompt(name, number, line) for number, line in lines]
    return [line for _, line in lines]


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except MALFORMED:
        return None


def _prompt(name: str, number: int, line: str) -> str:
    found = _parsed(line)
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt or any("\ud800" <= c <= "\udfff" for c in prompt):
        raise ConfigError(  # half a surrogate pair is no text
            f"line {number} of {name} is no JSON object with a text `prompt`",
            'Write {"prompt": "..."} on every line',
        )
    return prompt
