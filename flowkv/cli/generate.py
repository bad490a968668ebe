"""`flowkv generate`."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import flowkv
from flowkv.cli.arguments import AddVerb, count
from flowkv.core.config import load_config
from flowkv.demo.show import Screen, one_line, seconds

_DTYPES = ("float32", "bfloat16", "float16")


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    _generate_arguments(verb("generate", _generate, "answer prompts with a store on disk"))


def model_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds what says which model, and where it is computed."""
    about = "folder or Hugging Face id of a causal language model"
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
    from flowkv.measure.answer import answer_all, read_prompts

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
