"""`python -m bench cold`: what pages of cold tiers cost in bits and in divergence, by text.

The basis is learned from one kind of text, and judged there, on windows that nothing was learned
from, and on other kinds. Tables, headers and tokens that are stored whole are counted as bits.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import math
import os
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import torch

import flowkv
from bench.figures import divergence, ratios, save, spread
from flowkv.cli.arguments import AddVerb
from flowkv.core.geometry import GRANULE_BYTES, PageLayout, page_layout
from flowkv.hooks.huggingface.attach import door_of
from flowkv.hooks.huggingface.calibrate import Calibrator
from flowkv.kernels.reference import decoded, encoded
from flowkv.kvt.codec import PageCoder, read_head
from flowkv.kvt.tier import BATCH_TOKENS
from flowkv.report.screen import Screen
from flowkv.tiers.base import Outcome, TierAnswer
from flowkv.tiers.disk.tier import DiskTier
from flowkv.tiers.remote.objects import ObjectTier
from tests.tiers.remote.servers import object_server

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
    """GB/s of raw pages that one core codes, and decodes alone and in batches; MB of the basis."""
    size, layout = coder.layout.page_size, coder.layout
    with torch.inference_mode():
        layers = model(torch.tensor([ids[: 2 * size]]), use_cache=True).past_key_values.layers
    body, many = bytearray(layout.page_bytes), max(1, BATCH_TOKENS // size)
    backs = [memoryview(bytearray(layout.page_bytes)) for _ in range(many)]
    for name, view in zip(("keys", "values"), coder.views(memoryview(body)), strict=True):
        view.copy_(torch.stack([getattr(one, name)[0, :, size : 2 * size] for one in layers]))
    threads, best = torch.get_num_threads(), dict.fromkeys(("codes", "decodes", "batch"), math.inf)
    torch.set_num_threads(1)
    for _ in range(20):
        began = time.perf_counter()
        data = coder.encode(memoryview(body), 1)
        coded = time.perf_counter()
        assert coder.decode(memoryview(data), backs[0], 0, layout.layers)
        alone = time.perf_counter()
        pages = [(memoryview(data), back) for back in backs]
        assert all(coder.decode_batch(pages, 0, layout.layers))
        took = coded - began, alone - coded, (time.perf_counter() - alone) / many
        best = {
            name: min(least, one) for (name, least), one in zip(best.items(), took, strict=True)
        }
    torch.set_num_threads(threads)
    found = {f"{name}_gb_per_s": len(body) / took / 1e9 for name, took in best.items()}
    return {**found, "basis_mb": len(coder.data) / 1e6}


class Rounded(PageCoder):
    """Coder of pages in kv4c, which learns nothing: its loss shows how sensitive a text is."""

    def __init__(self, layout: PageLayout, group: flowkv.LayerGroup) -> None:
        self._fit(layout)
        layer = msgspec.structs.replace(group, layers=group.layers[:1], dtype="float16")
        self._coded = page_layout(layer, layout.page_size, "kv4c")

    def encode(self, body: memoryview, page_no: int) -> bytes:
        """Return the stripes of all layers."""
        keys, values = (side.float() for side in self.views(body))
        return encoded(keys, values, self._coded)[0].numpy().tobytes()

    def decode(self, data: memoryview, target: memoryview, first: int, layers: int) -> bool:
        """Write the page that comes back."""
        step = self._coded.stripe_stride_bytes // GRANULE_BYTES
        stripes = torch.frombuffer(data, dtype=torch.uint8)
        sides = decoded(stripes, self._coded, 0, [n * step for n in range(layers)])
        for view, side in zip(self.views(target), sides, strict=True):
            view.copy_(side)
        return True


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
                door, bases = door_of(loaded.model), kv.bases
                assert door is not None and bases is not None
                judge, current = Calibrator(door), bases.current
                (group,) = door.plan.geometry.groups
                rounded: dict[int, PageCoder] = {0: Rounded(current[0].layout, group)}
                for name, own in ids.items():
                    for way, coders in ((bound, current), ("kv4c", rounded)):
                        if (way, name) in {(row["bound"], row["text"]) for row in rows}:
                            continue
                        found = judge.judge(own[:others], coders)._asdict()
                        found["perplexity"] = math.exp(found.pop("nll")) - 1
                        found["tokens"] = len(own[:others]) // judge.window * (judge.window // 4)
                        rows.append({"bound": way, "text": name, **found})
                        say(str(rows[-1]))
    return rows


OBJECTS = ("kv8", "k8v4", "kv4c", "kvt")
"""Codecs of LMCache's serde."""


def objects(model: str, bound: float, tokens: int, say: Callable[[str], object]) -> list[Any]:
    """Rows of bits and divergence behind prompts of three objects of LMCache's, by codec and text.

    The serde gets no object's place; `places` is the share of objects in kvt whose place it found.
    """
    from flowkv.connect.serde import FlowKVDeserializer, FlowKVSerializer, ObjectHead
    from flowkv.kvt.file import BasisFile, open_basis, save_basis

    loaded, size, rows = flowkv.load(model), 256, list[Any]()
    ids = {name: loaded.encode(text) for name, text in texts().items()}
    with tempfile.TemporaryDirectory() as place, flowkv.attach(loaded.model, cold="kvt") as kv:
        door, bases = door_of(loaded.model), kv.bases
        assert door is not None and bases is not None
        (group,) = door.plan.geometry.groups
        say(str(Calibrator(door).calibrate(ids.pop("explanations")[:16384], bases, bound)))
        path = Path(place) / "basis.kvt"
        save_basis(path, BasisFile(model, group, kv.page_size, bases.current[0].data))
        basis = open_basis(path)
    shape = 2, len(group.layers), size, group.kv_heads * group.head_dim
    key = SimpleNamespace(chunk_hash=b"", model_name=model, kv_rank=0, object_group_id=0)
    key.cache_salt = ""
    for (name, own), codec in itertools.product(ids.items(), OBJECTS):
        given = codec, group.head_dim, basis if codec == "kvt" else None
        serializer, deserializer = FlowKVSerializer(*given), FlowKVDeserializer(*given)
        kl, same, found, n_bytes, seconds = 0.0, 0.0, 0, 0, [0.0, 0.0]
        starts = range(0, tokens, 4 * size)
        for start in starts:
            window = torch.tensor([own[start : start + 4 * size]])
            with torch.no_grad():
                cache = loaded.model(window[:, : 3 * size], use_cache=True).past_key_values
                exact = loaded.model(window[:, 3 * size :], past_key_values=copy.deepcopy(cache))
            for number in range(3):
                here = slice(number * size, (number + 1) * size)
                sides = [
                    [getattr(one, side)[0, :, here] for one in cache.layers]
                    for side in ("keys", "values")
                ]
                whole = torch.stack([torch.stack(side) for side in sides])  # [2, L, Hk, T, D]
                source = whole.transpose(2, 3).reshape(shape)
                desc = SimpleNamespace(shapes=[source.shape], dtypes=[source.dtype])
                blob = torch.zeros(serializer.estimate_serialized_size(desc), dtype=torch.uint8)
                began = time.perf_counter()
                used = serializer.serialize(
                    SimpleNamespace(tensor=source), SimpleNamespace(tensor=blob), key
                )
                seconds[0] += time.perf_counter() - began
                began = time.perf_counter()
                back = SimpleNamespace(tensor=torch.zeros_like(source))
                deserializer.deserialize(SimpleNamespace(tensor=blob), back, key)
                seconds[1] += time.perf_counter() - began
                n_bytes += used
                head = ObjectHead.of(memoryview(blob.numpy()))
                page = read_head(memoryview(blob[used - head.n_bytes :].numpy()))
                found += page is not None and page.page_no == number
                split = back.tensor.view(2, shape[1], size, group.kv_heads, group.head_dim)
                for one, keys, values in zip(cache.layers, *split.transpose(2, 3), strict=True):
                    one.keys[0, :, here], one.values[0, :, here] = keys, values
            with torch.no_grad():
                got = loaded.model(window[:, 3 * size :], past_key_values=cache)
            a, b = (x.logits[0].log_softmax(-1) for x in (exact, got))
            kl += float(divergence(b, a).mean()) / len(starts)
            same += float((a.argmax(-1) == b.argmax(-1)).float().mean()) / len(starts)
        count = 3 * len(starts)
        row = {"codec": codec, "text": name, "kl": kl, "same_token": same}
        row |= {"bits": 8 * n_bytes / (count * math.prod(shape)), "places": found / count}
        rates = [count * math.prod(shape) * source.itemsize / 1e9 / took for took in seconds]
        rows.append(row | dict(zip(("codes_gb_per_s", "decodes_gb_per_s"), rates, strict=True)))
        say(str(rows[-1]))
    return rows


@contextmanager
def paced(rate: float, kind: type[DiskTier | ObjectTier]) -> Iterator[None]:
    """Let tiers of a kind answer loads at no more than so many bytes a second, inside the block."""
    poll, free_s = kind.poll, [0.0]
    held = dict[int, deque[tuple[float, TierAnswer]]]()

    def slowly(self: Any, timeout_s: float = 0.0) -> list[TierAnswer]:
        mine, end_s = held.setdefault(id(self), deque()), time.perf_counter() + timeout_s
        while True:
            wait_s = max(0.0, (mine[0][0] if mine else end_s) - time.perf_counter())
            for answer in poll(self, min(wait_s, max(0.0, end_s - time.perf_counter()))):
                loads = answer.outcome is Outcome.HIT
                free_s[0] = max(free_s[0], time.perf_counter()) + loads * answer.n_bytes / rate
                mine.append((free_s[0] if loads else 0.0, answer))
            now_s, due = time.perf_counter(), list[TierAnswer]()
            while mine and mine[0][0] <= now_s:
                due.append(mine.popleft()[1])
            if due or now_s >= end_s:
                return due

    with patch.object(kind, "poll", slowly):
        yield


WAYS: dict[str, dict[str, Any]] = {"raw": {}, "kv8": {"codec": "kv8"}, "kvt": {"cold": "kvt"}}


def first_tokens(
    model: str, tokens: int, given: argparse.Namespace, say: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Seconds to the first token behind a prompt on a tier of a rate, by way, in a later process.

    A prompt of another text is stored in each way; every round opens each store once.
    """
    rate = 1e6 * given.rate
    loaded = flowkv.load(model)
    ids = {name: loaded.encode(text) for name, text in texts().items()}
    prompt = torch.tensor([ids["guides"][: tokens + 1]])
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    shape = {"max_new_tokens": 1, "do_sample": False}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(object_server(place)) if given.s3 else None
        if server:
            own = server.options
            names = {"endpoint": "AWS_ENDPOINT_URL", "region": "AWS_REGION"}
            names |= {key: f"AWS_{key.upper()}" for key in ("access_key_id", "secret_access_key")}
            found = {names[key]: own[key] for key in names} | {"AWS_ALLOW_HTTP": "true"}
            stack.enter_context(patch.dict(os.environ, found))
        stack.enter_context(paced(rate, ObjectTier if server else DiskTier))
        for number in range(given.rounds + 1):
            for way, options in WAYS.items():
                below = f"{server.uri}/{way}" if server else f"disk:{place}/{way}:4GiB"
                with flowkv.attach(loaded.model, tiers=["gpu:1GiB", below], **options) as kv:
                    if not number and way == "kvt":
                        say(str(kv.calibrate(ids["explanations"][:16384])))
                    time.sleep(number and 1.0)  # the basis is read, as in a process that serves
                    began = time.perf_counter()
                    loaded.model.generate(prompt, **shape)
                    first_s = time.perf_counter() - began
                    kv.flush(600)
                    reused = kv.stats()["tokens_reused"]
                    if number:
                        took[way].append(first_s)
                    say(f"{way} {first_s:.3f} s, {reused} of {tokens + 1} tokens from the tier")
    rows = []
    for way, seconds in took.items():
        least, middle, most = spread(ratios(seconds, took["kv8"]))
        row = {"way": way, "mb_per_s": rate / 1e6, "seconds": statistics.median(seconds)}
        rows.append(row | {"of_kv8": middle, "least": least, "most": most})
    return rows


def _cold(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore", flowkv.ExperimentalWarning)
    bounds = [float(one) for one in given.kl.split(",")]
    if given.rate:
        rows = first_tokens(given.model, 2048, given, screen.say)
    elif given.objects:
        rows = objects(given.model, bounds[0], given.others, screen.say)
    else:
        rows = measure(given.model, bounds, given.tokens, given.others, screen.say)
    found = {"threads": given.threads, "torch": torch.__version__, "rows": rows}
    save(given.out, found)
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
    added.option(
        "--rate",
        "MB",
        "time first tokens from a disk of so many MB/s instead",
        type=float,
        default=0.0,
    )
    about = "with --rate: from S3 (`rclone serve s3`) instead of a disk"
    added.add_argument("--s3", action="store_true", help=about)
    about = "judge objects of LMCache's serde instead, in a process that can import LMCache"
    added.add_argument("--objects", action="store_true", help=about)
    added.option("--rounds", "N", "of --rate; default %(default)s", type=int, default=5)
    added.option("--threads", "N", "of torch; default %(default)s", type=int, default=2)
    added.option("--out", "FILE", "writes all figures as JSON", type=Path)
