"""Quality of caches on real weights: part `quality` of `python -m bench real`.

English prose is read in contexts, in chunks of 128 tokens, through one cache after the other. A
chunk sees the tokens before it as the cache keeps them, and its own as they are: FlowKV's pages
are full and encoded by then (`recent_tokens=0`), and the quantized caches of Hugging Face, whose
window of raw tokens is 128, have just emptied it. Only "auto" keeps recent tokens as it does by
default. The first chunk has no past and does not count. Pages of tiers below the device, in codec
kvt, are read in the same way where files of bases are given (`flowkv calibrate`).

Every context is read with all caches before the next one begins, contexts are spread over the
text, and each is a file in the folder `--resume`: a run can be stopped and goes on later, and its
figures are those of the same tokens for every cache at any time. A process a thread reads them.
"""

from __future__ import annotations

import argparse
import ast
import copy
import doctest
import hashlib
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import Cache, QuantizedLayer

import flowkv
from bench.figures import percent_more
from flowkv.core.errors import ConfigError
from flowkv.hooks.huggingface.load import DTYPES, load
from flowkv.kvt.codec import PageCoder
from flowkv.kvt.file import open_basis
from flowkv.kvt.learning import coded_pages

CHUNK, LENGTH, POOL, EXACT = 128, 2048, "192MiB", "DynamicCache"
PACKAGE, SHA256 = "networkx", "438041fbcaf8c9b6d60759feb06e568f03cb7f4d0b97ae7fbd737467d1c77a60"
"""Where the text comes from: what torch needs is installed with FlowKV; see `constraints.txt`."""
GOALS = {"kv8": 0.1, "k8v4": 1.5, "kv4c": 1.5}
"""Most perplexity that a codec may add, in percent."""
FLOWKV = {name: {"codec": name, "recent_tokens": 0} for name in ("kv8", "k8v4", "kv4c", "kv4h")}
FLOWKV["auto"] = {"codec": "auto"}
PEERS = {
    "HF fp8": {"backend": "fp8"},
    "HF HQQ, 8 bits": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "HF HQQ, 4 bits": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "HF quanto, 4 bits": {"backend": "quanto", "nbits": 4},
}
_NEEDS = {"hqq": "hqq", "quanto": "optimum"}


def text(file: Path | None) -> str:
    """The prose of a package's documentation strings, without their examples; or a file.

    Raises:
        ConfigError: The package is another version than the one whose figures are published.
    """
    if file:
        return file.read_text(encoding="utf-8")
    said, parser = [], doctest.DocTestParser()
    for path in sorted(Path(importlib.util.find_spec(PACKAGE).origin).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())) if "tests" not in path.parts else ():
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                parts = parser.parse(ast.get_docstring(node) or "")
                said.append("".join(part for part in parts if isinstance(part, str)).strip())
    found = "\n\n".join(filter(None, said))
    if hashlib.sha256(found.encode()).hexdigest() != SHA256:
        raise ConfigError(
            f"the text of this {PACKAGE} is not that of the published figures",
            "Install the version in constraints.txt, or give --text FILE",
        )
    return found


class Rounded(QuantizedLayer):
    """Plain rounding behind the window of Hugging Face's caches: an fp16 scale a token and head."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        scale = tensor.abs().amax(-1, keepdim=True) / (2 ** (self.nbits - 1) - 1)
        scale = scale.half().float().clamp(min=1e-7)
        return (tensor / scale).round() * scale

    def _dequantize(self, qtensor: torch.Tensor) -> torch.Tensor:
        return qtensor


class Cold(DynamicCache):
    """Pages of a codec kvt: coded and decoded once, when the tokens behind them begin.

    Args:
        config: Of the model.
        coder: Coder of the pages.
    """

    def __init__(self, config: Any, coder: PageCoder) -> None:
        super().__init__(config=config)
        self._coder, self._pages, self._n_bytes = coder, 0, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values of a layer; before the first one, code the full pages."""
        if layer_idx == 0:
            self.n_bytes()
        return super().update(key_states, value_states, layer_idx, *more)

    def n_bytes(self) -> int:
        """Code the full pages and return the bytes of all."""
        size, first = self._coder.layout.page_size, self._pages
        self._pages = self.get_seq_length() // size
        here = slice(first * size, self._pages * size)
        if first < self._pages:
            held = [[x.keys[0, :, here], x.values[0, :, here]] for x in self.layers]
            keys, values = (torch.stack(some) for some in zip(*held, strict=True))
            found, coded, _ = coded_pages(self._coder, (keys, values), first)
            self._n_bytes += coded
            for parts, *sides in zip(held, *found, strict=True):
                for part, side in zip(parts, sides, strict=True):
                    part.copy_(side)
        return self._n_bytes


class Way(NamedTuple):
    """One kind of cache.

    Attributes:
        model: What it is attached to, or handed to.
        cache: Makes one for a context.
        n_bytes: What it holds.
    """

    model: Any
    cache: Callable[[torch.Tensor], Any]
    n_bytes: Callable[[Any], float]


def ways(model: Any, bases: Sequence[Path] = ()) -> dict[str, Way]:
    """All of them by name; the first is exact."""
    config = model.config
    made = {EXACT: Way(model, lambda ids: DynamicCache(config=config), _held)}
    for name, fields in FLOWKV.items():
        twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        made[name] = _attached(twin, flowkv.attach(twin, write_back=False, gpu=POOL, **fields))
    for path in bases:
        cold = partial(Cold, config, open_basis(path).coder)
        made[f"kvt, {path.stem}"] = Way(model, lambda ids, cold=cold: cold(), Cold.n_bytes)
    for name, options in PEERS.items():
        if importlib.util.find_spec(_NEEDS.get(options["backend"], "torch")):
            make = partial(QuantizedCache, config=config, **options)
            made[name] = Way(model, lambda ids, make=make: make(), _held)
    for bits in (8, 4):
        made[f"rounded by token, {bits} bits"] = Way(
            model,
            lambda ids, bits=bits: Cache([Rounded(bits) for _ in range(config.num_hidden_layers)]),
            lambda cache, bits=bits: _held(cache) * (bits + 16 / 64) / 32,
        )
    return made


def _attached(model: Any, kv: flowkv.KV) -> Way:
    def cache(ids: torch.Tensor) -> Any:
        kv.invalidate()  # nothing is known of another context
        return kv.cache(ids)

    def n_bytes(_cache: Any) -> float:
        return sum(device["used_bytes"] for device in kv.stats()["devices"].values())

    return Way(model, cache, n_bytes)


def _held(of: Any) -> float:
    """Bytes of the tensors of a cache of Hugging Face."""
    if isinstance(of, torch.Tensor):
        flatten = getattr(of, "__tensor_flatten__", None)  # quanto's hold others
        return sum(_held(getattr(of, name)) for name in flatten()[0]) if flatten else of.nbytes
    if isinstance(of, Cache):
        of = [vars(layer) for layer in of.layers]
    parts = of.values() if isinstance(of, dict) else of if isinstance(of, list | tuple) else ()
    return sum(map(_held, parts))


@torch.no_grad()
def read(model: Any, cache: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats of each token behind the first chunk, and which one was expected in its place."""
    nats, expected = [], []
    for given, wanted in zip(ids[:-1].split(CHUNK), ids[1:].split(CHUNK), strict=True):
        logits = model(given[None], past_key_values=cache).logits[0].float()
        nats.append(cross_entropy(logits, wanted, reduction="none").double())
        expected.append(logits.argmax(-1))
    return torch.cat(nats[1:]), torch.cat(expected[1:])


def contexts(tokens: Sequence[int], count: int, length: int) -> list[torch.Tensor]:
    """Evenly spaced, int64 `[length + 1]` each; the first few of them are spread as well.

    Raises:
        ConfigError: The text is too short.
    """
    step = (len(tokens) - length - 1) / max(1, count - 1)
    if step < (length + 1 if count > 1 else 0):
        raise ConfigError(
            f"a text of {len(tokens):,} tokens for {count} contexts of {length:,}",
            "Give a longer --text, or ask for fewer --contexts",
        )
    order = sorted(range(count), key=lambda n: n * 0.618034 % 1)
    return [torch.tensor(tokens[int(n * step) :][: length + 1]) for n in order]


def settings(given: argparse.Namespace) -> tuple[Any, list[torch.Tensor], str]:
    """The model, the contexts, and a digest of what was asked for."""
    prose, length = text(given.text), min(LENGTH, given.longest)
    loaded = load(given.model, dtype=given.dtype, device="cpu")
    cut = contexts(loaded.encode(prose), given.contexts, length)
    asked = [given.model, given.dtype, CHUNK, FLOWKV, PEERS, [ids.tolist() for ids in cut]]
    asked += [[path.name, path.read_bytes().hex()] for path in given.basis]
    return loaded.model, cut, hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def read_share(given: argparse.Namespace, share: str) -> None:
    """Reads every n-th context that the folder lacks with all caches; `share` is "k/n/folder"."""
    first, of, folder = share.split("/", 2)
    model, cut, _ = settings(given)
    made, until = ways(model, given.basis), time.monotonic() + 60 * given.minutes
    for number in range(int(first), len(cut), int(of)):
        path, ids = Path(folder) / f"{number:03}.json", cut[number]
        if path.exists() or time.monotonic() > until:
            continue
        found, exact = {}, torch.empty(0)
        for name, way in made.items():
            cache = way.cache(ids[None, :-1])
            nats, expected = read(way.model, cache, ids)
            exact = exact if found else expected
            agreed = int((expected == exact).sum())
            found[name] = nats.sum().item(), agreed, way.n_bytes(cache)
            del cache
        path.write_text(json.dumps({"tokens": len(exact), "found": found}))
        print(f"context {number} of {len(cut)}", file=sys.stderr, flush=True)


def quality(
    given: argparse.Namespace, child: Callable[[argparse.Namespace, str], Any]
) -> Iterator[dict[str, Any]]:
    """A row a cache, over all contexts that the folder holds when the minutes are over."""
    *_, digest = settings(given)
    one = argparse.Namespace(**{**vars(given), "threads": 1})
    with ExitStack() as stack:
        root = given.resume or stack.enter_context(tempfile.TemporaryDirectory())
        folder = Path(root) / digest[:12]
        folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(given.threads) as pool:
            shares = [f"{n}/{given.threads}/{folder}" for n in range(given.threads)]
            list(pool.map(partial(child, one), shares))
        read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    yield from rows(read, torch.finfo(DTYPES[given.dtype]).bits)


def rows(read: Sequence[dict[str, Any]], bits: int) -> Iterator[dict[str, Any]]:
    """What was found, by cache; a mean with two standard errors of the differences of contexts."""
    if not read:
        raise ConfigError("no context was read", "Allow more --minutes")
    tokens = sum(one["tokens"] for one in read)
    exact = [one["found"][EXACT] for one in read]
    for name in read[0]["found"]:
        found = [one["found"][name] for one in read]
        more = [
            (mine[0] - its[0]) / one["tokens"]
            for mine, its, one in zip(found, exact, read, strict=True)
        ]
        percent = [*percent_more(more, errors=2.0)]
        row = {
            "what": f"quality, {name}",
            "tokens": tokens,
            "perplexity": math.exp(sum(nats for nats, _, _ in found) / tokens),
            "more_percent": percent if len(more) > 1 else percent[1],
            "agreement_percent": 100 * sum(agreed for _, agreed, _ in found) / tokens,
            "bits": bits * sum(size for *_, size in found) / sum(size for *_, size in exact),
        }
        yield row | ({"goal_percent": GOALS[name]} if name in GOALS else {})
