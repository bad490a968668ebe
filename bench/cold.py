"""`python -m bench cold`: what pages of cold tiers cost in bits and in divergence, by text.

The basis is learned from one kind of text, and judged there, on windows that nothing was learned
from, and on other kinds. Tables, headers and tokens that are stored whole are counted as bits.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flowkv
from flowkv.cli.arguments import AddVerb
from flowkv.hooks.huggingface.attach import door_of
from flowkv.hooks.huggingface.calibrate import Calibrator
from flowkv.report.screen import Screen

_ROOT = Path(__file__).parents[1]


def texts() -> dict[str, str]:
    """Texts of several kinds, the first one to learn from."""
    docs, guides = ((_ROOT / "docs" / part).glob("*.md") for part in ("explain", "guides"))
    code = Path(inspect.getfile(flowkv)).parent.glob("cache/*.py")
    spoken = [str(getattr(one, "__doc__", "")) for one in vars(torch).values()]
    return {
        "explanations": "\n\n".join(path.read_text() for path in sorted(docs)),
        "guides": "\n\n".join(path.read_text() for path in sorted(guides)),
        "code": "\n\n".join(path.read_text() for path in sorted(code)),
        "documentation of torch": "\n\n".join(spoken),
    }


def speeds(model: Any, coder: Any, ids: list[int]) -> dict[str, float]:
    """GB/s of raw pages that one core codes and decodes, and MB of the basis."""
    size, layout = coder.layout.page_size, coder.layout
    with torch.inference_mode():
        layers = model(torch.tensor([ids[: 2 * size]]), use_cache=True).past_key_values.layers
    body, back = bytearray(layout.page_bytes), bytearray(layout.page_bytes)
    for name, view in zip(("keys", "values"), coder.views(memoryview(body)), strict=True):
        view.copy_(torch.stack([getattr(one, name)[0, :, size : 2 * size] for one in layers]))
    threads, best = torch.get_num_threads(), {"codes": math.inf, "decodes": math.inf}
    torch.set_num_threads(1)
    for _ in range(20):
        began = time.perf_counter()
        data = coder.encode(memoryview(body), 1)
        coded = time.perf_counter()
        assert coder.decode(memoryview(data), memoryview(back), 0, layout.layers)
        best["codes"] = min(best["codes"], coded - began)
        best["decodes"] = min(best["decodes"], time.perf_counter() - coded)
    torch.set_num_threads(threads)
    found = {f"{name}_gb_per_s": len(body) / took / 1e9 for name, took in best.items()}
    return {**found, "basis_mb": len(coder.data) / 1e6}


def measure(
    model: str, bounds: list[float], tokens: int, others: int, say: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Rows of bits and divergence for each bound and text."""
    loaded = flowkv.load(model)
    ids = {name: loaded.encode(text)[:tokens] for name, text in texts().items()}
    rows = []
    for bound in bounds:
        with tempfile.TemporaryDirectory() as place:
            kv = flowkv.attach(loaded.model, disk=f"{place}:4GiB", cold="kvt")
            with kv:
                began = time.perf_counter()
                learned = kv.calibrate(next(iter(ids.values())), kl=bound)
                seconds = time.perf_counter() - began
                row = {"bound": bound, "text": "explanations", "seconds": seconds, **learned}
                row |= speeds(loaded.model, kv.bases.current[0], ids["explanations"])
                rows.append(row)
                say(str(row))
                judge, bases = Calibrator(door_of(loaded.model)), kv.bases
                assert bases is not None
                for name, own in list(ids.items())[1:]:
                    found = judge.judge(own[:others], bases)._asdict()
                    found["perplexity"] = math.exp(found.pop("nll")) - 1
                    found["tokens"] = len(own[:others]) // judge.window * (judge.window // 4)
                    rows.append({"bound": bound, "text": name, **found})
                    say(str(rows[-1]))
    return rows


def _cold(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore", flowkv.ExperimentalWarning)
    bounds = [float(one) for one in given.kl.split(",")]
    rows = measure(given.model, bounds, given.tokens, given.others, screen.say)
    found = {"threads": given.threads, "torch": torch.__version__, "rows": rows}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0, found


def add_verbs(verb: AddVerb) -> None:
    """Adds the verb."""
    added = verb("cold", _cold, "bits and divergence of pages on cold tiers")
    added.option("--model", "NAME", "as of flowkv.load; default %(default)s", default="smollm2")
    added.option("--kl", "BOUNDS", "of the divergence; default %(default)s", default="0.005,0.02")
    added.option("--tokens", "N", "to learn from; default %(default)s", type=int, default=16384)
    added.option(
        "--others", "N", "judged of each other text; default %(default)s", type=int, default=8192
    )
    added.option("--threads", "N", "of torch; default %(default)s", type=int, default=2)
    added.option("--out", "FILE", "writes all figures as JSON", type=Path)
