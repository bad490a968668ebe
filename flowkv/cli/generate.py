"""`flowkv generate`: prompts of a file, answered with a store on disk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

import flowkv
from flowkv.cli.arguments import AddVerb, count
from flowkv.core.config import load_config
from flowkv.core.errors import ConfigError
from flowkv.report.screen import Screen, one_line
from flowkv.report.words import seconds

_DTYPES = ("float32", "bfloat16", "float16")


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    _generate_arguments(verb("generate", _generate, "answer prompts with a store on disk"))


def model_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds what says which model, and where it is computed."""
    about = "folder or Hugging Face id of a causal language model, or smollm2"
    about += "" if required else "; default a tiny one that comes with FlowKV"
    parser.add_argument("--model", required=required, default="", metavar="PATH_OR_ID", help=about)
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="default %(default)s")
    parser.add_argument("--device", default="", help="default the GPU if there is one, else cpu")
    parser.add_argument("--threads", type=count, default=0, help="threads of torch")


def trace_argument(parser: argparse.ArgumentParser) -> None:
    """Adds what has a trace written."""
    about = "write a Chrome trace of what was computed and loaded when, for Perfetto"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=about)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser, required=True)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help='a prompt per line, or JSON lines with {"prompt": ...}; - for standard input',
    )
    parser.add_argument("--store", required=True, metavar="DIR[:SIZE]", help="made if need be")
    parser.add_argument(
        "--max-new-tokens", type=count, default=64, metavar="N", help="default %(default)s"
    )
    trace_argument(parser)


def _generate(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    prompts = read_prompts(given.prompts)
    load_config(disk=given.store)
    with screen.progress("loading the model"):
        import torch

        from flowkv.hooks.huggingface.load import load_model

        if given.threads:
            torch.set_num_threads(given.threads)
        loaded = load_model(given.model, dtype=given.dtype, device=given.device or None)
    kv = flowkv.attach(loaded.model, disk=given.store)
    with ExitStack() as stack:
        stack.callback(kv.close)
        if given.trace:
            stack.enter_context(kv.trace(given.trace))
        answers = []
        for number, answer in enumerate(
            answer_all(loaded, kv, prompts, max_new_tokens=given.max_new_tokens), 1
        ):
            answers.append(answer)
            screen.say(f"{number}. {one_line(answer.prompt)}", style="bold")
            screen.say(answer.answer)
            screen.say(
                f"{answer.tokens_reused:,} of {answer.prompt_tokens:,} tokens reused, first token"
                f" after {seconds(answer.ttft_s)}\n",
                style="dim",
            )
        kv.flush()
        stats = kv.stats()
    result = {
        "answers": answers,
        "tokens_reused": stats["tokens_reused"],
        "hit_rate": stats["hit_rate"],
        "tiers": stats["tiers"],
        "device": str(loaded.model.device),
    }
    return 0, result


class AnswerLine(msgspec.Struct, kw_only=True):
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
) -> Iterator[AnswerLine]:
    """Answers greedily, in order.

    Args:
        loaded: A model with `encode` and `decode` (`flowkv.hooks.huggingface.load.LoadedModel`).
        kv: The `KV` that is attached to it.
        prompts: Texts.
        max_new_tokens: Most new tokens of an answer.

    Raises:
        ConfigError: A prompt is empty once it is tokens.
    """
    from flowkv.demo.timing import Reuse, timed_generate

    for prompt in prompts:
        tokens = loaded.encode(prompt)
        before = Reuse.of(kv)
        timing = timed_generate(loaded.model, [tokens], max_new_tokens=max_new_tokens)
        (new,) = timing.answers
        yield AnswerLine(
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
