"""`python -m bench overflow`: decoding over contexts that are several times their device pool.

A model decodes one answer three times: over a pool that holds the context, over a part of that with
the rest in host memory behind an emulated link, and with the rest on a real disk; a few steps each,
in turns. A step takes no less than over the pool that holds all, nor than its bytes take on the
way: the greater of both is the bound.

`--simulate` goes the way of `Scan.attend` on a clock, on an H100 whose pool is what weights leave
of its memory: simulated from data sheets, not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

import flowkv
from bench.figures import between, ratios, read_rate
from bench.real import Texts, load
from flowkv.cache.overflow import MOST_BYTES
from flowkv.cli.arguments import AddVerb, count
from flowkv.core.config import format_size, parse_size
from flowkv.core.geometry import LayerGroup, page_layout
from flowkv.report.screen import Screen
from flowkv.sim.hardware import HARDWARE, MODELS, Hardware, Shape
from flowkv.testing import Faults, FlakyTier
from flowkv.tiers.host import HostTier

WAYS = ("all on the device", "host, emulated link", "disk")


class Answer:
    """One way to decode.

    Args:
        given: The command's arguments.
        prompt: Token ids.
        config: Of the cache.
    """

    def __init__(self, given: argparse.Namespace, prompt: list[int], **config: Any) -> None:
        self.model = load(given).model
        self.kv = flowkv.attach(self.model, codec=given.codec, host=config.pop("host", 0), **config)
        self.cache, self.tokens = DynamicCache(), list[int]()
        self._forward(torch.tensor([prompt]))
        self.steps(given.steps)  # what is compiled and allocated counts for nobody

    def _forward(self, ids: torch.Tensor) -> None:
        with torch.no_grad():
            given = dict(past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            logits = self.model(input_ids=ids, **given).logits
        self.tokens.append(int(logits[0, -1].argmax()))

    def steps(self, number: int) -> dict[str, float]:
        """Decodes; the median of seconds and CPU seconds, and bytes read, of a step."""
        before = self.kv.stats()["overflow"].get("read_bytes", 0)
        wall, cpu = [], []
        for _ in range(number):
            began_s, used_s = time.perf_counter(), time.process_time()
            self._forward(torch.tensor([self.tokens[-1:]]))
            wall.append(time.perf_counter() - began_s)
            cpu.append(time.process_time() - used_s)
        read = self.kv.stats()["overflow"].get("read_bytes", 0) - before
        return {"wall_s": median(wall), "cpu_s": median(cpu), "n_bytes": read / number}


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    parser = verb("overflow", _overflow, "decode over contexts longer than the device pool")
    parser.add_argument("--model", default="smollm2", help="folder or Hugging Face id")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--codec", default="raw")
    parser.add_argument("--page-size", type=count, default=64)
    parser.add_argument("--tokens", type=count, default=4096)
    parser.add_argument("--times", type=float, default=4.0, help="the context over its pool")
    parser.add_argument("--rate", default="1GB", help="bytes a second of the emulated link")
    parser.add_argument("--steps", type=count, default=6, help="of each way in a turn")
    parser.add_argument("--turns", type=count, default=5)
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--simulate", action="store_true", help="an H100, on a simulator's clock")
    parser.add_argument("--dir", type=Path, help="on the disk to be measured; default a new one")


def _overflow(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    if given.simulate:
        return 0, _simulate(screen)
    torch.set_num_threads(given.threads)
    loaded = load(given)
    prompt = Texts(loaded.encode).next(given.tokens)
    with flowkv.attach(loaded.model, gpu="64MiB", codec=given.codec) as probe:
        assert probe.planner is not None
        forms = probe.planner.store.forms
        least = (min(one.page_bytes for one in form.layouts.values()) for form in forms)
        page = sum(least) * given.page_size // probe.page_size
    pool = round(page * given.tokens / given.page_size / given.times)
    with contextlib.ExitStack() as stack:
        folder = given.dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rate, common = float(parse_size(given.rate)), dict(page_size=given.page_size)
        small = common | dict(overflow=True)
        link = FlakyTier(HostTier(8 << 30), 0, Faults(bytes_per_s=rate))
        answers = (
            Answer(given, prompt, gpu=round(4 * given.times * pool), **common),
            Answer(given, prompt, tiers=[f"gpu:{pool}B", link], host=None, **small),
            Answer(given, prompt, gpu=pool, disk=str(folder), **small),
        )
        ways = dict(zip(WAYS, answers, strict=True))
        turns = [{w: one.steps(given.steps) for w, one in ways.items()} for _ in range(given.turns)]
        files = (path for path in folder.rglob("*") if path.is_file())
        rates = {WAYS[1]: rate, WAYS[2]: read_rate(max(files, key=lambda one: one.stat().st_size))}
        result = _told(turns, rates, ways, given, screen)
        screen.say(f"pool {format_size(pool)}, {given.tokens:,} tokens of {given.model}")
        for one in ways.values():
            one.kv.close()
    return int(given.codec == "raw" and not result["identical"]), result


def _told(
    turns: list[dict[str, dict[str, float]]],
    rates: dict[str, float],
    ways: dict[str, Answer],
    given: argparse.Namespace,
    screen: Screen,
) -> dict[str, Any]:
    result: dict[str, Any] = {"turns": turns, "rates": rates, "over_bound": {}}
    result["identical"] = len({tuple(one.tokens) for one in ways.values()}) == 1
    rows = []
    for way in WAYS:
        seconds = [turn[way]["wall_s"] for turn in turns]
        line = [way, f"{1e3 * median(seconds):.1f} ms"]
        line += [f"{1e3 * median(turn[way]['cpu_s'] for turn in turns):.1f} ms"]
        if way in rates:
            n_bytes = median(turn[way]["n_bytes"] for turn in turns)
            bounds = [max(t[WAYS[0]]["wall_s"], t[way]["n_bytes"] / rates[way]) for t in turns]
            over = sorted(ratios(seconds, bounds))
            result["over_bound"][way] = over
            line += [f"{n_bytes / 1e6:.1f} MB", f"{rates[way] / 1e9:.2f} GB/s"]
            line += [f"{1e3 * median(bounds):.1f} ms"]
            line += [between(over)]
        rows.append(line + [""] * (7 - len(line)))
    head = ["way", "a step", "CPU time", "read", "rate", "bound", "step over bound"]
    title = f"{given.times:g} times the pool, {given.codec}, load {os.getloadavg()[0]:.1f}"
    screen.table(head, rows, title=title)
    screen.say(f"the same tokens in all ways: {result['identical']}")
    return result


PAGE, USABLE = 256, 0.92
WEIGHT_BYTES = {"8b": 2.0, "70b": 1.0}  # a parameter; 70b would not fit with two
LINKS = {"PCIe 4": 25e9, "PCIe 5": 55e9, "NVMe": 6.5e9}
"""Bytes a second; what copies reach of 32 and 63 GB/s, and one drive's data sheet."""
STRIPE_S = (0.0, 50e-6)
"""Of the host for each stripe that it asks for: none, and as measured on a CPU."""


def simulated_step(
    shape: Shape,
    on: Hardware,
    weight_bytes: float,
    tokens: int,
    codec: str,
    rate: float,
    each_s: float,
) -> tuple[float, float]:
    """Seconds of a decoding step, and the bound: what it computes, or what crosses the link.

    Args:
        shape: The model.
        on: The accelerator; its memory holds weights, and pages in what they leave.
        weight_bytes: Of a parameter.
        tokens: The context.
        codec: Of its pages.
        rate: Bytes a second of the link.
        each_s: Seconds of the host for each stripe.
    """
    group = LayerGroup(
        layers=(0,),
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        dtype="bfloat16",
    )
    stripe = page_layout(group, PAGE, codec).stripe_stride_bytes
    memory, weights = on.place("hbm").bytes_per_s, shape.parameters * weight_bytes
    pages = -(-tokens // PAGE)
    held = min(pages, int((on.memory_bytes * USABLE - weights) // (stripe * shape.layers)))
    a_tile = max(1, MOST_BYTES // stripe)
    tiles = [min(a_tile, pages - first) for first in range(held, pages, a_tile)]
    compute_s = (weights + pages * shape.layers * stripe) / memory
    bound_s = max(compute_s, (pages - held) * shape.layers * stripe / rate)
    latency_s, now_s, free_s, begun_s = on.place("dram").latency_s, 0.0, 0.0, 0.0

    def ask(stripes: int) -> float:
        nonlocal now_s, free_s
        now_s += stripes * each_s
        free_s = max(free_s, now_s + latency_s) + stripes * stripe / rate
        return free_s

    coming_s = ask(tiles[0]) if tiles else 0.0
    for step in range(2):  # the first begins with nothing under way
        begun_s = now_s if step else 0.0
        for _ in range(shape.layers):
            now_s += (weights / shape.layers + held * stripe) / memory
            for number, stripes in enumerate(tiles):
                now_s = max(now_s, coming_s)
                coming_s = ask(tiles[(number + 1) % len(tiles)])
                now_s += stripes * stripe / memory
    return now_s - begun_s, bound_s


def _simulate(screen: Screen) -> list[dict[str, Any]]:
    rows, found = [], list[dict[str, Any]]()
    for model, weight_bytes in WEIGHT_BYTES.items():
        for tokens in (1 << 17, 1 << 19, 1 << 20):
            for codec in ("raw", "kv8", "kv4c"):
                line = [model, f"{tokens:,}", codec]
                for link, rate in LINKS.items():
                    of = MODELS[model], HARDWARE["h100"], weight_bytes, tokens, codec, rate
                    (step_s, bound_s), (slow_s, _) = (simulated_step(*of, s) for s in STRIPE_S)
                    line.append(f"{1 / step_s:.3g} ({step_s / bound_s:.2f}; {1 / slow_s:.3g})")
                    one = dict(model=model, tokens=tokens, codec=codec, link=link, bound_s=bound_s)
                    found.append(one | dict(step_s=step_s, with_host_s=slow_s))
                rows.append(line)
    title = "simulated, H100: tokens a second (step over bound; with 50 us of the host a stripe)"
    screen.table(["model", "tokens", "codec", *LINKS], rows, title=title)
    return found
