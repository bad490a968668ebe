"""`python -m bench weights`: a model whose weights do not fit, beside accelerate and a mapping.

Each way has a process of its own, which enters a memory cgroup when all is imported: the budget for
weights, and `--slack` for everything else, page cache included. The file's pages are dropped first.
From there on the clock runs to the first token of a prompt: making the model, loading or attaching
its weights, and a prefill; "whole" loads all of them first, with memory for everything. Ways
alternate, in rounds. Answers are alike to the bit where weights lie as aligned as torch has them,
which those of a mapped file do not. What a forward costs at least: the time of one with everything
in memory, or the bytes that it must read at the rate of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import flowkv
from bench.embedding import memory_group
from bench.figures import answer, between
from flowkv.cli.arguments import AddVerb, count, names
from flowkv.core.config import parse_size
from flowkv.hooks.huggingface.load import DTYPES, load
from flowkv.report.screen import Screen

WAYS = ("flowkv", "accelerate", "mapping", "whole")
PREFILL, STEPS = 256, 6


def _saved(given: argparse.Namespace, folder: Path) -> int:
    """The model as a directory of safetensors; bytes of its weights."""
    if given.model == "random":  # of 1.5 GiB in float32
        sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 14}
        heads = {"num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 32_000}
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
        model: Any = LlamaForCausalLM(config).to(DTYPES[given.dtype])
    else:
        model = load(given.model, dtype=given.dtype, device="cpu").model
    model.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters())


def child(given: argparse.Namespace) -> dict[str, Any]:
    """One way, in its cgroup: seconds to the first token, of each step, and of a prefill."""
    from accelerate import (  # type: ignore[import-untyped]
        infer_auto_device_map,
        init_empty_weights,
        load_checkpoint_and_dispatch,
    )
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    way, group, folder, budget = given.child.split("|")
    config, dtype = AutoConfig.from_pretrained(folder), DTYPES[given.dtype]
    torch.set_num_threads(given.threads)
    torch.nn.functional.scaled_dot_product_attention(*torch.rand(3, 1, 1, 4, 8))
    (path,) = Path(folder).glob("*.safetensors")
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(10, config.vocab_size, (STEPS + 1, PREFILL), generator=generator)
    began_s, stats = time.perf_counter(), dict[str, Any]()
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.tie_weights()
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        streamed = None
        if way == "flowkv":
            manifests = str(Path(folder) / "manifests")
            streamed = flowkv.attach_weights(model, path, budget=budget, disk=manifests)
            stack.callback(streamed.close)
        elif way == "accelerate":
            most = {"cpu": int(budget), "disk": 1 << 40}
            names = getattr(model, "_no_split_modules", None)
            where = infer_auto_device_map(model, most, no_split_module_classes=names)
            offload = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
            model = load_checkpoint_and_dispatch(
                model, folder, device_map={k: str(v) for k, v in where.items()},
                offload_folder=offload, dtype=dtype,
            )  # fmt: skip
        else:
            found = load_file(path)  # mapped, where nothing says otherwise
            if way == "whole":
                found = {name: tensor.clone() for name, tensor in found.items()}
            model.load_state_dict(found, strict=False, assign=True)
            model.tie_weights()
        first = model(ids[:1], use_cache=False).logits[:, -1]
        first_s, steps, sums = time.perf_counter() - began_s, [], [float(first.sum())]
        before = streamed.stats() if streamed else {}
        for n in range(STEPS):
            step_s = time.perf_counter()
            sums.append(float(model(ids[n + 1 : n + 2, :1], use_cache=False).logits.sum()))
            steps.append(time.perf_counter() - step_s)
        if streamed:
            after = streamed.stats()
            stats = {k: (after[k] - before[k]) / STEPS for k in ("read_bytes", "blocked_s")}
            before = after
        prefill_s = time.perf_counter()
        sums.append(float(model(ids[:1], use_cache=False).logits[:, -1].sum()))
        prefill_s = time.perf_counter() - prefill_s
        if streamed:
            stats["prefill_blocked_s"] = streamed.stats()["blocked_s"] - before["blocked_s"]
    return {"first_s": first_s, "steps": steps, "prefill_s": prefill_s, "sums": sums, **stats}


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    parser = verb("weights", _weights, "compute with weights that do not fit")
    parser.add_argument("--model", default="smollm2", help="folder, Hugging Face id, or random")
    parser.add_argument("--dtype", default="float32", choices=sorted(DTYPES))
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--slack", default="256MiB", help="memory for all but weights")
    parser.add_argument("--ways", type=names, default=list(WAYS), help=f"of {','.join(WAYS)}")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)


def _weights(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.child:
        return 0, child(given)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), []
        total = _saved(given, folder)

        def budget(way: str, share: float) -> int:
            return 4 * total if way == "whole" else int(share * total)

        for share in (0.25, 0.5):
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in given.ways}
            for _ in range(given.rounds):
                for way, done in runs.items():
                    done.append(_measured(given, way, folder, budget(way, share)))
            result[f"{share:.0%}"] = {**runs, "total_bytes": total}
            rows += _rows(f"{share:.0%}", runs, total, share)
    heads = ["budget", "way", "a token", "of ours", "prefill", "first", "read", "waited", "alike"]
    screen.table(
        heads, rows, title=f"{given.model}, {given.dtype}, {total / 1e6:.0f} MB of weights"
    )
    return 0, result


def _measured(
    given: argparse.Namespace, way: str, folder: Path, budget_bytes: int
) -> dict[str, Any]:
    with memory_group(budget_bytes + parse_size(given.slack)) as group:
        command = [sys.executable, "-m", "bench", "weights", "--json", "--dtype", given.dtype]
        command += ["--threads", str(given.threads)]
        command += ["--child", f"{way}|{group}|{folder}|{budget_bytes}"]
        try:
            found: dict[str, Any] = answer(command)
        except subprocess.CalledProcessError as error:  # it did not fit, or could not be served
            found = {"failed": error.returncode}
    return found


def _rows(
    budget: str, runs: dict[str, list[dict[str, Any]]], total: int, share: float
) -> list[list[str]]:
    rows, ours = [], [median(one["steps"]) for one in runs["flowkv"] if "steps" in one]
    exact = runs.get("whole", runs["flowkv"])[0].get("sums")
    for way, done in runs.items():
        good = [one for one in done if "steps" in one]
        if not good:
            rows.append([budget, way, "failed", *[""] * 6])
            continue
        steps = [median(one["steps"]) for one in good]
        read, waited = (
            median(one.get(k, 0.0) for one in good) for k in ("read_bytes", "blocked_s")
        )
        least = (1 - share) * total
        prefill_s = median(one["prefill_s"] for one in good)
        prefill_waited = median(one.get("prefill_blocked_s", 0.0) for one in good) / prefill_s
        rows.append(
            [
                *(budget, way, f"{1e3 * median(steps):.0f} ms"),
                between([a / b for a, b in zip(steps, ours, strict=False)]),
                f"{prefill_s:.2f} s",
                f"{median(one['first_s'] for one in good):.2f} s",
                f"{read / least:.3f}" if read else "",
                f"{waited / median(steps):.0%}, {prefill_waited:.0%}" if read else "",
                "yes" if all(one["sums"] == exact for one in good) else "no",
            ]
        )
    return rows
