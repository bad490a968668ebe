"""Pace of live decodes while prompts are restored beside them.

    python -m bench.bench_decode_pace              # a table
    python -m bench.bench_decode_pace --json       # one JSON object

One thread decodes without a pause. Another one serves long prompts, in turn so that they come back
from a tier (overlapped: part computed, part loaded), or are computed from nothing. Windows of
both take turns in one run, so that other work on the machine meets both. Two tiers: a disk, which
is far faster here than computing, so that nearly all is loaded; and memory behind a link that takes
as long as computing does, where part is computed beside the decodes once a prompt is larger than
what is asked of a tier at once (`loaded_share` says how much was loaded). Two ways of asking:

    back to back     the next request as soon as one is served: restores serve more of them
    same requests    one request at a time at the pace that recomputing can keep, in both

The figure is the decoded tokens per second beside restores over that beside recomputing, median of
the windows; 1 means that restores cost decodes nothing that recomputing would not have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import flowkv
from flowkv import KV, Geometry
from flowkv.testing import Faults, FlakyTier
from flowkv.tiers.host import HostTier

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 64


class Block(nn.Module):
    """A decoder layer with grouped queries."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        width = HEADS * DIM
        self.layer = layer
        self.norm_a, self.norm_b = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, N, width]` in and out."""
        parts = self.qkv(self.norm_a(x)).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = parts.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        y = flowkv.attention(q, k, v, layer=self.layer)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.norm_b(x))))


class Model(nn.Module):
    """Token ids and positions in, logits of the last token out; random weights."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        width = HEADS * DIM
        self.tokens, self.positions = nn.Embedding(512, width), nn.Embedding(1 << 14, width)
        self.blocks = nn.Sequential(*map(Block, range(layers)))
        self.head = nn.Linear(width, 512)
        self.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits `[1, 512]`."""
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        return self.head(x[:, -1])


class Window(NamedTuple):
    """What happened in one window.

    Attributes:
        decoded: Tokens per second of the decoding thread.
        slowest_s: Its slowest step.
        served: Requests served.
        served_s: Seconds of the median request.
    """

    decoded: float
    slowest_s: float
    served: int
    served_s: float


class Decoder:
    """Decodes on a thread of its own until it is closed, each sequence up to a length.

    Attributes:
        ends: When each step was done, in `time.perf_counter` seconds.
    """

    def __init__(self, kv: KV, model: Model, tokens: int = 256) -> None:
        self._kv, self._model, self._tokens = kv, model, tokens
        self.ends: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @torch.no_grad()
    def _run(self) -> None:
        torch.set_num_threads(1)
        while not self._over.is_set():
            with self._kv.open(range(PAGE), tenant="decoder") as seq:
                for step in self._kv.prefill([seq]):
                    self._model(step.tokens, step.positions)
                while seq.length < self._tokens and not self._over.is_set():
                    with self._kv.step([seq], [[7]]) as step:
                        self._model(step.tokens, step.positions)
                    self.ends.append(time.perf_counter())

    def close(self) -> None:
        """Waits for its last step."""
        self._over.set()
        self._thread.join()


def serve(kv: KV, model: Model, prompt: list[int], *, restores: bool) -> None:
    """One request, up to its first token."""
    with kv.open(prompt, reuse=restores, wait=False) as seq:
        kv.restore([seq], lambda step: model(step.tokens, step.positions))


def window(
    decoder: Decoder, serve_one: Callable[[], None], seconds: float, every_s: float
) -> Window:
    """Serves for so long, a request every so many seconds at most, and counts what was decoded."""
    begun, first, served = time.perf_counter(), len(decoder.ends), []
    while (now := time.perf_counter()) < begun + seconds:
        serve_one()
        served.append(time.perf_counter() - now)
        time.sleep(max(0.0, now + every_s - time.perf_counter()))
    ends = [begun, *decoder.ends[first:]]
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    lasted = time.perf_counter() - begun
    return Window(len(gaps) / lasted, max(gaps), len(served), statistics.median(served))


def measure(
    *, layers: int, tokens: int, prompts: int, windows: int, seconds: float
) -> dict[str, Any]:
    """Both tiers, both ways of asking, both ways of serving, window by window in turn."""
    torch.set_num_threads(1)
    model, rows = Model(layers), list[dict[str, Any]]()
    page_bytes = layers * 2 * KV_HEADS * PAGE * DIM * 4
    pool = page_bytes * (2 * tokens // PAGE + 32)  # two prompts: the others are below
    texts = [[n + 1] + [(n * 37 + i * 11) % 512 for i in range(tokens)] for n in range(prompts)]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        with cache(layers, pool, []) as kv:
            begun = time.perf_counter()
            for text in texts[:3]:
                serve(kv, model, text, restores=False)
            recompute_s = (time.perf_counter() - begun) / 3
        rate = Faults(bytes_per_s=page_bytes * tokens / PAGE / recompute_s)
        link = FlakyTier(HostTier(1 << 31), 0, rate)
        for name, tier in (("disk", f"disk:{folder}:2GiB"), ("even link", link)):
            with cache(layers, pool, [tier]) as kv:
                for found in rounds(kv, model, texts, windows, seconds):
                    rows.append({"tier": name, **found})
    report = {"label": "measured", "threads": 2, "layers": layers, "tokens": tokens}
    return report | {"windows": windows, "window_s": seconds, "rows": rows}


def cache(layers: int, pool_bytes: int, tiers: list[Any]) -> KV:
    """A cache that brings nothing back before it is asked for."""
    geometry = Geometry.uniform(layers=layers, kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE)
    stack = [f"gpu:{pool_bytes}B", *tiers]
    return KV(geometry, namespace="pace", tiers=stack, policy="lru", prefetch="off")


def rounds(
    kv: KV, model: Model, texts: list[list[int]], windows: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """A row for each way of asking."""
    turns = {True: 0, False: 0}

    def one(restores: bool) -> None:
        turns[restores] += 1
        serve(kv, model, texts[turns[restores] % len(texts)], restores=restores)

    for _ in texts:
        one(False)
    kv.flush()
    for _ in range(2 * len(texts)):
        one(True)
    decoder = Decoder(kv, model)
    try:
        window(decoder, lambda: one(True), seconds, 0.0)
        alone = window(decoder, lambda: time.sleep(0.05), seconds, 0.0)
        pace_s = 1.2 * window(decoder, lambda: one(False), seconds, 0.0).served_s
        for asked, every_s in (("back to back", 0.0), ("same requests", pace_s)):
            before = split(kv)
            found: dict[bool, list[Window]] = {True: [], False: []}
            for _ in range(windows):
                for restores in (True, False):
                    one_window = window(decoder, partial(one, restores), seconds, every_s)
                    found[restores].append(one_window)
            loaded, computed = (now - then for now, then in zip(split(kv), before, strict=True))
            yield {
                "requests": asked,
                "decoded_alone_per_s": round(alone.decoded, 1),
                "loaded_share": round(loaded / max(1, loaded + computed), 3),
                **_row(found[True], found[False]),
            }
    finally:
        decoder.close()


def split(kv: KV) -> tuple[float, float]:
    """Tokens of restored prefixes that were loaded, and those that were computed."""
    names = ("restore_loaded_tokens_total", "restore_computed_tokens_total")
    loaded, computed = map(kv.metrics.total, names)
    return loaded, computed


def _row(restored: list[Window], computed: list[Window]) -> dict[str, Any]:
    ratios = sorted(a.decoded / b.decoded for a, b in zip(restored, computed, strict=True))
    beside, without = (
        statistics.median(w.decoded for w in windows) for windows in (restored, computed)
    )
    return {
        "beside_restores_per_s": round(beside, 1),
        "beside_recompute_per_s": round(without, 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(ratios[0], 3),
        "ratio_most": round(ratios[-1], 3),
        "restore_s": round(statistics.median(w.served_s for w in restored), 4),
        "recompute_s": round(statistics.median(w.served_s for w in computed), 4),
        "slowest_step_beside_restores_s": round(max(w.slowest_s for w in restored), 4),
        "slowest_step_beside_recompute_s": round(max(w.slowest_s for w in computed), 4),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each window")
    parser.add_argument("--json", action="store_true")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    report = measure(**given)
    if as_json:
        print(json.dumps(report, indent=2))
        return
    print("measured, two threads; tokens/s decoded")
    for row in report["rows"]:
        print(
            f"{row['tier']:>9}, {row['requests']:>13}, {row['loaded_share']:.0%} loaded: "
            f"{row['beside_restores_per_s']:8} tokens/s beside restores, "
            f"{row['beside_recompute_per_s']:8} beside recomputing: ratio {row['ratio']} "
            f"({row['ratio_least']} to {row['ratio_most']}); a request takes "
            f"{1e3 * row['restore_s']:.0f} ms restored, {1e3 * row['recompute_s']:.0f} ms computed"
        )


if __name__ == "__main__":
    main()
