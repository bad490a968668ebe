"""Stories of prompts whose stored pages do not come, told end to end through models.

A world is a model, a store that was filled by clean runs, and the answers of the model alone. A
round copies the store, damages up to three pages of each prompt, and asks all prompts over it. Each
answer must be that of the model alone, and every frame in the store afterwards must hold the keys
and values of a clean run: a wrong page under a right name fails even where no token shows it.
"""

from __future__ import annotations

import functools
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import redis
import torch

import flowkv
from flowkv import Engine
from flowkv.testing import MemoryTier
from flowkv.tiers import Completion, Load, Outcome, Store, open_tier
from flowkv.tiers.disk import DiskTier
from tests.cache.audit import audit
from tests.cache.fakes import Halves, Wrapped
from tests.cache.test_pinned import behind_a_bus
from tests.engine import nano
from tests.inside import HostTier, ObjectTier
from tests.tiers.frames import answers
from tests.tiers.remote.servers_redis import redis_server

from . import models
from .compare import generate

PAGE, PAGES, NEW = 16, 7, 2
PART = 5
"""Prompts of each part of a round, which is asked in a way of its own."""
STORED = ("flipped", "cut", "another's", "gone")
"""Damages to a stored frame, done before the cache is opened or after."""
ANSWERED = ("late once", "late")
"""Failures of a tier that has the frame."""
FAULTS = (*((kind, when) for kind in STORED for when in ("before", "after")),)
FAULTS += (*((kind, "after") for kind in ANSWERED),)
SUBSETS = [each for n in (1, 2, 3) for each in combinations(range(PAGES), n)]


class Failing(Wrapped):
    """A tier that answers loads of some keys too late, and the others one by one.

    Attributes:
        late: Number of loads of a key that are still to fail.
        every: Polls for each answer to a load; 0 answers at once.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.late: dict[bytes, int] = {}
        self._jobs, self._sent = 0, dict[int, tuple[int, int]]()
        self._owed: list[Completion] = []
        self.every, self._polls = 0, 0

    def submit_load(self, items: Any, *, deadline_s: float = 10.0) -> int:
        self._jobs -= 1
        for index, item in enumerate(items):
            if self.late.get(item.key, 0):
                self.late[item.key] -= 1
                late = Completion(self._jobs, index, item.key, Outcome.FAILED, "late")
                self._owed.append(late)
            else:
                job = self.inner.submit_load([item], deadline_s=deadline_s)
                self._sent[job] = self._jobs, index
        return self._jobs

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        found = []
        for answer in self.inner.poll(0.0 if self._owed else timeout_s):
            if answer.job in self._sent:
                job, item = self._sent.pop(answer.job)
                self._owed.append(answer._replace(job=job, item=item))
            else:
                found.append(answer)
        self._polls += 1
        if not self.every or self._polls % self.every == 0:
            count = 1 if self.every else len(self._owed)
            found += self._owed[:count]
            del self._owed[:count]
        return found

    def cancel(self, job: int) -> None:
        """Answers in any case."""


class Shelf(ABC):
    """A store that outlives its caches, whose frames can be damaged."""

    lasting = True
    """Whether frames outlive the tier."""

    def opened(self, kv: flowkv.KV, seed: int) -> None:  # noqa: B027 - only memory has to know
        """Take notice of a cache over the store, before anything is asked."""

    def close(self) -> None:  # noqa: B027 - only a server has something to release
        """Release what the store runs in."""

    @abstractmethod
    def tier(self) -> Any:
        """Open the store."""

    @abstractmethod
    def damage(self, key: bytes, how: str, other: bytes, rng: random.Random) -> None:
        """Damage the frame of a key, or put the frame of another key in its place."""

    @abstractmethod
    def save(self) -> Any:
        """Return a copy of the store."""

    @abstractmethod
    def restore(self, saved: Any) -> None:
        """Put a copy in place of the store."""

    def fill(self, frames: dict[bytes, Any]) -> None:
        """Store frames of the memory tier for tests."""
        tier = self.tier()
        stores = [Store(key, head.info, memoryview(body)) for key, (head, body) in frames.items()]
        found = answers(tier, tier.submit_store(stores), len(stores))
        assert {one.outcome for one in found} == {Outcome.STORED}, found
        tier.close()

    def bodies(self) -> dict[bytes, bytes]:
        """Return what each frame holds."""
        tier, found = self.tier(), dict[bytes, bytes]()
        for entry in list(tier.scan()):
            target = bytearray(entry.n_bytes)
            load = Load(entry.key, memoryview(target), entry.info.layout, 255)
            tier.submit_load([load], deadline_s=20.0)
            (answer,) = tier.poll(20.0)
            if answer.outcome is Outcome.HIT:
                found[entry.key] = bytes(target[: answer.n_bytes])
        tier.close()
        return found


def mangled(data: bytes, how: str, rng: random.Random, first: int = 0) -> bytes:
    """Return data with a bit flipped, or without its end."""
    if how == "cut" or len(data) <= first:
        return data[: first + (len(data) - first) // 2]
    at, changed = rng.randrange(first, len(data)), bytearray(data)
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


class MemoryShelf(Shelf):
    """Frames of the memory tier for tests, in place of a disk."""

    def __init__(self, directory: Path) -> None:
        self.frames: dict[bytes, Any] = {}

    def tier(self) -> Any:
        memory = MemoryTier(name="shelf")
        memory.frames = self.frames
        return Wrapped(memory, kind="disk", close=lambda: None)

    def damage(self, key: bytes, how: str, other: bytes, rng: random.Random) -> None:
        if how == "gone" or not {key, other} <= self.frames.keys():
            self.frames.pop(key, None)
        elif how == "another's":
            self.frames[key] = self.frames[key][0], self.frames[other][1]
        else:
            header, body = self.frames[key]
            self.frames[key] = header, mangled(body, how, rng)

    def save(self) -> Any:
        return dict(self.frames)

    def restore(self, saved: Any) -> None:
        self.frames = dict(saved)


class HostShelf(MemoryShelf):
    """Host memory, whose pages come back after the device has lost them.

    Of models of one group in every second round, and of others in those between, a device reaches
    it: pages are kept and lent where they lie.
    """

    lasting = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.made: HostTier | None = None

    def tier(self) -> Any:
        self.made = HostTier(64 << 20)
        return self.made

    def opened(self, kv: flowkv.KV, seed: int) -> None:
        if seed % 2:
            behind_a_bus(kv)

    def damage(self, key: bytes, how: str, other: bytes, rng: random.Random) -> None:
        assert self.made is not None
        frames = self.made._frames
        if how == "gone" or not {key, other} <= frames.keys():
            self.made.delete([key])
        else:
            body = frames[key].body
            if how == "another's":
                body[:] = frames[other].body
            elif how == "cut":
                body[len(body) // 2 :] = 0
            else:
                body[:] = np.frombuffer(mangled(bytes(body), how, rng), np.uint8)


class ObjectShelf(Shelf):
    """An object store in a directory, through the client library that S3 is reached by."""

    def __init__(self, directory: Path) -> None:
        pytest.importorskip("obstore")
        self.path = directory / "objects"
        self.path.mkdir()

    def tier(self) -> Any:
        return ObjectTier(f"file://{self.path}")

    def damage(self, key: bytes, how: str, other: bytes, rng: random.Random) -> None:
        found, others = (list(self.path.rglob(f"*{name.hex()}*")) for name in (key, other))
        for file in found:
            if how == "gone":
                file.unlink()
            elif how == "another's":
                file.write_bytes(others[0].read_bytes() if others else b"")
            else:
                file.write_bytes(mangled(file.read_bytes(), how, rng))

    def save(self) -> Any:
        return {file: file.read_bytes() for file in self.path.rglob("*") if file.is_file()}

    def restore(self, saved: Any) -> None:
        for file in self.path.rglob("*"):
            if file.is_file():
                file.unlink()
        for file, data in saved.items():
            file.write_bytes(data)


class RedisShelf(Shelf):
    """A real server, which may evict and whose values may be overwritten."""

    def __init__(self, directory: Path) -> None:
        self._running = redis_server(directory)
        self._server = self._running.__enter__()
        self._client = redis.Redis(port=self._server.port)

    def close(self) -> None:
        self._client.close()
        self._running.__exit__(None, None, None)

    def tier(self) -> Any:
        return open_tier("redis", path=f"{self._server.uri}/0")

    def damage(self, key: bytes, how: str, other: bytes, rng: random.Random) -> None:
        found, others = self._names(key), self._names(other)
        for name in found:
            data = self._client.get(name)
            if how == "gone" or data is None:
                self._client.delete(name)
            elif how == "another's":
                self._client.set(name, (self._client.get(others[0]) if others else None) or b"")
            else:
                self._client.set(name, mangled(data, how, rng))

    def _names(self, key: bytes) -> list[bytes]:
        names = self._client.keys("*")
        return [name for name in names if key in name or key.hex().encode() in name]

    def save(self) -> Any:
        return {name: self._client.dump(name) for name in self._client.keys("*")}

    def restore(self, saved: Any) -> None:
        self._client.flushall()
        for name, data in saved.items():
            self._client.restore(name, 0, data)


class DiskShelf(Shelf):
    """A directory, damaged in its files."""

    def __init__(self, directory: Path) -> None:
        self.path, self._saved = directory / "kv", directory / "saved"

    def tier(self) -> Any:
        return DiskTier(self.path, 64 << 20)

    def damage(self, key: bytes, how: str, other: bytes, rng: random.Random) -> None:
        file, first, size = self._find(key)
        if file is None:
            return
        with file.open("r+b") as slab:
            slab.seek(first)
            frame = slab.read(size)
            if how == "another's":
                source, at, _ = self._find(other)
                body = b"" if source is None else source.read_bytes()[at + 4096 : at + size]
                frame = frame[:4096] + body.ljust(size - 4096, b"\0")
            elif how == "gone":
                frame = bytes(size)
            elif how == "cut":
                frame = mangled(frame, how, rng, 4096).ljust(size, b"\0")
            else:
                half = (4096 + size) // 2
                frame = frame[:4096] + mangled(frame[4096:half], how, rng) + frame[half:]
            slab.seek(first)
            slab.write(frame)

    def _find(self, key: bytes) -> tuple[Path | None, int, int]:
        for file in self.path.glob("slab*"):
            size = int(file.name.rpartition("-")[2]) * 4096
            at = file.read_bytes().find(key)
            if at >= 0:
                return file, at // size * size, size
        return None, 0, 0

    def save(self) -> Any:
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.copytree(self.path, self._saved)
        return self._saved

    def restore(self, saved: Any) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(saved, self.path)
        self.path.chmod(0o700)


SHELVES: dict[str, Callable[[Path], Shelf]] = {
    "memory": MemoryShelf,
    "host": HostShelf,
    "disk": DiskShelf,
    "objects": ObjectShelf,
    "redis": RedisShelf,
}


class Answer(NamedTuple):
    """New tokens and, where they are looked at, their logits."""

    tokens: list[int]
    logits: list[torch.Tensor]


class Asked(ABC):
    """A model and the ways in which it is asked."""

    ways: tuple[str, ...] = ("alone",)
    quick = ""
    """The way that asks several prompts in one forward."""

    @abstractmethod
    def attach(self, tier: Any, **options: Any) -> flowkv.KV:
        """Open a cache over a tier."""

    @abstractmethod
    def plain(self, ids: torch.Tensor) -> Answer:
        """Return the answer without a cache."""

    @abstractmethod
    def ask(self, kv: flowkv.KV, prompts: list[torch.Tensor], way: str) -> list[Answer]:
        """Return the answers over a cache."""


def small(name: str) -> Any:
    """Return a model of two layers."""
    model = models.causal(name)
    config: Any = model.config
    config.num_hidden_layers = 2
    if name in models.CAUSAL and getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    return models.sharpen(type(model)(config))


class Causal(Asked):
    """A decoder of transformers, asked by `generate` and by the Engine."""

    ways = ("alone", "batch", "beforehand", "engine", "chunks")

    def __init__(self, name: str) -> None:
        self.model = small(name)
        self.quick = "batch"
        if name in models.HYBRID:
            self.ways, self.quick = ("alone", "engine"), "engine"

    def attach(self, tier: Any, **options: Any) -> flowkv.KV:
        tiers = ["gpu:64MiB", tier]
        return flowkv.attach(self.model, tiers=tiers, page_size=PAGE, prefetch="off", **options)

    def given(self, ids: torch.Tensor) -> dict[str, Any]:
        return dict(input_ids=ids, attention_mask=torch.ones_like(ids))

    def plain(self, ids: torch.Tensor) -> Answer:
        return self._answers(generate(self.model, NEW, **self.given(ids)), ids)[0]

    def ask(self, kv: flowkv.KV, prompts: list[torch.Tensor], way: str) -> list[Answer]:
        if way == "batch":
            return self._batch(prompts)
        if way == "engine":
            with Engine(self.model, kv) as engine:
                texts = [ids[0].tolist() for ids in prompts]
                found = engine.run(texts, max_new_tokens=NEW)
                return [Answer(list(one.tokens), []) for one in found]
        found = []
        for ids in prompts:
            given = self.given(ids)
            if way == "beforehand":
                given["past_key_values"] = kv.cache(**given)
            elif way == "chunks":
                given["prefill_chunk_size"] = 48
            found += self._answers(generate(self.model, NEW, **given), ids)
        return found

    def _batch(self, prompts: list[torch.Tensor]) -> list[Answer]:
        given = models.padded(*prompts)
        return self._answers(generate(self.model, NEW, **given), given["input_ids"])

    def _answers(self, run: Any, ids: torch.Tensor) -> list[Answer]:
        logits = torch.stack(run.logits)  # [steps, rows, vocabulary]
        new = run.sequences[:, -len(logits) :].tolist()
        return [Answer(new[row], [*logits[:, row]]) for row in range(len(new))]


class Paired(Causal):
    """An encoder-decoder, which knows what it decoded by its text."""

    ways, quick = ("alone", "alone", "batch"), "batch"

    def __init__(self, name: str) -> None:
        self.model = models.t5()
        self._text = models.prompt(24, seed=9)

    def given(self, ids: torch.Tensor) -> dict[str, Any]:
        text = self._text.expand(len(ids), -1)
        return dict(input_ids=text, attention_mask=torch.ones_like(text), decoder_input_ids=ids)

    def _batch(self, prompts: list[torch.Tensor]) -> list[Answer]:
        """Ask those of one length at once: decoders of transformers know no padding."""
        found = dict[int, Answer]()
        for length in {ids.shape[1] for ids in prompts}:
            which = [i for i, ids in enumerate(prompts) if ids.shape[1] == length]
            rows = torch.cat([prompts[i] for i in which])
            run = generate(self.model, NEW, **self.given(rows))
            found |= zip(which, self._answers(run, rows), strict=True)
        return [found[i] for i in range(len(prompts))]


class Own(Asked):
    """A model of one's own over `KV.open`, restored while it is computed, or loaded first."""

    ways = ("prefill", "restore")

    def __init__(self, name: str) -> None:
        self.model = nano.Nano()

    def attach(self, tier: Any, **options: Any) -> flowkv.KV:
        shape = flowkv.Geometry.uniform(
            layers=nano.LAYERS, kv_heads=nano.HEADS, head_dim=nano.DIM, page_size=PAGE
        )
        tiers = ["gpu:64MiB", tier]
        return flowkv.KV(shape, namespace="nano", tiers=tiers, prefetch="off", **options)

    def plain(self, ids: torch.Tensor) -> Answer:
        return Answer(self.model.alone(self._text(ids), NEW), [])

    def ask(self, kv: flowkv.KV, prompts: list[torch.Tensor], way: str) -> list[Answer]:
        return [Answer(self._one(kv, self._text(ids), way), []) for ids in prompts]

    def _text(self, ids: torch.Tensor) -> list[int]:
        return (ids[0] % nano.VOCABULARY).tolist()

    @torch.no_grad()
    def _one(self, kv: flowkv.KV, text: list[int], way: str) -> list[int]:
        new: list[int] = []
        with kv.open(text, wait=way == "prefill") as seq:
            if way == "prefill":
                for step in kv.prefill([seq]):
                    logits = self.model(step.tokens, step.positions)
            else:
                (logits,) = kv.restore([seq], lambda step: self.model(step.tokens, step.positions))
            for _ in range(NEW):
                new.append(int(logits[0, -1].argmax()))
                with kv.step([seq], [[new[-1]]]) as step:
                    logits = self.model(step.tokens, step.positions)
        return new


MODELS: dict[str, Callable[[str], Asked]] = {
    "llama": Causal,
    "gemma3": Causal,  # windows beside full attention
    "mistral": Causal,  # windows alone
    "deepseek_v3": Causal,  # latent attention
    "falcon_h1": Causal,  # recurrent layers beside attention
    "t5": Paired,
    "own": Own,
}


def keys_of(kv: flowkv.KV, asked: Asked, ids: torch.Tensor) -> list[list[bytes]]:
    """Return the keys of a prompt's pages, for each layer group."""
    text = asked._text(ids) if isinstance(asked, Own) else ids[0].tolist()
    salts: list[Any] = []
    if isinstance(asked, Paired):  # what the encoder was given is part of each name
        with pytest.MonkeyPatch.context() as patch:
            opening = kv.open
            patch.setattr(kv, "open", lambda *a, **k: salts.extend(k["salts"]) or opening(*a, **k))
            asked.ask(kv, [ids], "alone")
    with kv.open(text, salts=salts, reuse=False) as seq:
        pages = range(len(text) // PAGE)
        return [[seq.key(g, page) for page in pages] for g in range(len(seq.blocks))]


class Known(NamedTuple):
    """What does not depend on the store: a model, prompts, and the answers of the model alone.

    Attributes:
        keys: Of the pages of each prompt, for each layer group.
        frames: What a clean run stores.
    """

    asked: Asked
    prompts: list[torch.Tensor]
    wanted: list[Answer]
    keys: list[list[list[bytes]]]
    frames: dict[bytes, Any]


@functools.cache
def known(model: str, count: int) -> Known:
    """Return a model of `MODELS` and what it answers to a number of prompts."""
    asked, prompts = MODELS[model](model), []
    ends = [0, 1, 9, 15, 4, 12]  # tokens behind the last full page
    shared = models.prompt(3 * PAGE, seed=77)
    for i in range(count):
        ids = models.prompt(PAGES * PAGE + ends[i % len(ends)], seed=100 + i)
        if i % 4 == 3:
            ids[:, : 3 * PAGE] = shared
        if model == "t5":
            ids[0, 0] = 1  # or `generate` puts the first token of all texts before it
        prompts.append(ids)
    wanted, shelf = [asked.plain(ids) for ids in prompts], MemoryShelf(Path())
    kv = asked.attach(shelf.tier())
    found = asked.ask(kv, prompts, asked.ways[0])
    for i, answer in enumerate(found):
        compare(i, asked.ways[0], answer, wanted[i])
    keys = [keys_of(kv, asked, ids) for ids in prompts]
    assert kv.flush()
    kv.close()
    return Known(asked, prompts, wanted, keys, shelf.frames)


def compare(prompt: int, way: str, found: Answer, wanted: Answer) -> None:
    """Compare an answer with that of the model alone."""
    assert found.tokens == wanted.tokens, f"prompt {prompt} asked by {way}: other tokens"
    for ours, theirs in zip(found.logits, wanted.logits, strict=False):
        worst = float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1.0))
        assert worst < 2e-4, f"prompt {prompt} asked by {way}: logits differ by {worst}"


class World:
    """A model, a filled store, and the answers of the model alone.

    Args:
        model: One of `MODELS`.
        shelf: One of `SHELVES`.
        directory: For files of its own.
        count: Prompts.
    """

    def __init__(self, model: str, shelf: str, directory: Path, count: int = 60) -> None:
        self.asked, self.prompts, self.wanted, self.keys, frames = known(model, count)
        self.shelf = SHELVES[shelf](directory)
        self.golden: dict[bytes, bytes] = {}
        if self.shelf.lasting:
            self.shelf.fill(frames)
            self.golden = self.shelf.bodies()
            assert self.golden == {key: body for key, (_, body) in frames.items()}
        self.clean = self.shelf.save()
        self.stories = 0

    @contextmanager
    def over(self, seed: int = 0, **options: Any) -> Iterator[tuple[flowkv.KV, Failing]]:
        """Open a cache over the store."""
        tier = Failing(self.shelf.tier())
        kv = self.asked.attach(tier, **options)
        self.shelf.opened(kv, seed + len(self.keys[0]))
        try:
            yield kv, tier
        finally:
            kv.close()

    def check(self, kv: flowkv.KV, which: Any, way: str) -> None:
        """Ask prompts, and compare what comes out with the model alone."""
        which = list(which)
        found = self.asked.ask(kv, [self.prompts[i] for i in which], way)
        for i, answer in zip(which, found, strict=True):
            compare(i, way, answer, self.wanted[i])

    def round(self, seed: int) -> None:
        """Tell one story of each prompt, then ask everything again in another cache."""
        rng = random.Random(seed)
        order = rng.sample(range(len(self.prompts)), len(self.prompts))
        parts = [order[i : i + PART] for i in range(0, len(order), PART)]
        ways = [rng.choice(self.asked.ways) for _ in parts]
        faults: list[tuple[bytes, str, str]] = []
        for i in order:
            for page in rng.choice(SUBSETS):
                kind, when = rng.choice(FAULTS)
                groups = self.keys[i]
                chosen = groups if rng.random() < 0.5 else [rng.choice(groups)]
                faults += ((pages[page], kind, when) for pages in chosen)
        self.shelf.restore(self.clean)
        every = [key for groups in self.keys for pages in groups for key in pages]

        def break_frames(when: str) -> None:
            for key, kind, moment in faults:
                if kind in STORED and moment == when:
                    self.shelf.damage(key, kind, rng.choice(every), rng)

        if self.shelf.lasting:
            break_frames("before")
        with self.over(seed, load_deadline_s=2.0) as (kv, tier):
            if not self.shelf.lasting:
                self.check(kv, order, self.asked.quick or ways[0])
                self._leave_the_device(kv)
                break_frames("before")
            break_frames("after")
            for key, kind, _ in faults:
                if kind in ANSWERED:
                    tier.late[key] = 1 if kind == "late once" else 1 << 30
            usual = kv.restores.policy
            for part, way in zip(parts, ways, strict=True):
                tier.every = rng.choice([0, 1, 3, 5])
                halves = way != "engine" and rng.random() < 0.4  # it waits for a policy's suffix
                kv.restores.policy = Halves(rng.choice([0.0, 0.0, 0.3, 0.6])) if halves else usual
                self.check(kv, part, way)
            self.check(kv, order[:3], ways[1])
            kv.flush()
            audit(kv)
        self.stories += len(order)
        if not self.shelf.lasting:
            return
        for key, body in self.shelf.bodies().items():
            if key in self.golden:
                assert alike(body, self.golden[key]), "a wrong page was stored under a right name"
        with self.over() as (kv, _):
            self.check(kv, order, self.asked.quick or ways[0])

    def _leave_the_device(self, kv: flowkv.KV) -> None:
        """Make every page leave the device for the tier below."""
        with kv.lock:
            planner = kv.planner
            assert planner is not None
            for pool in planner.store.pools.values():
                taken: list[int] = []
                while fresh := planner.store.allocator.try_allocate(0, 1):
                    taken += fresh
                for page in taken:
                    pool.release(page)


def alike(one: bytes, other: bytes) -> bool:
    """Whether two bodies hold the same numbers, up to the order of additions."""
    if len(one) != len(other):
        return False
    a, b = (np.frombuffer(body[: len(body) // 4 * 4], np.float32) for body in (one, other))
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True))
