"""The fault list: every entry has tests, which are here where they are nowhere else."""

from __future__ import annotations

import ast
import contextlib
import gc
import marshal
import pickle
import random
import resource
import shutil
import socket
import time
import tracemalloc
import warnings
from collections import UserDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import flowkv
from flowkv import FlowKVError, Tier
from flowkv.testing import MemoryTier
from flowkv.tiers import BadFrame, Envelope, Load, Outcome, decode_header, encode_header
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.shared import SharedTier
from tests.audit import PACKAGE, Forbidden
from tests.cache.fakes import Wrapped
from tests.cache.toy import check_content, make_kv, published, simple, write
from tests.hooks.nano import make_nano
from tests.inside import MAGIC, ArchiveReader, HostTier, StoreError, digest_of

from .fault_list import FAULTS
from .frames import LAYOUT, answers, body_of, get, info_of, key_of, leave, outcomes, stored

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
in_files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)


# ---- the list


@lru_cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_its_tests(fault: str) -> None:
    what, names = FAULTS[fault]
    assert what and names
    for name in names:
        path, _, test = name.partition("::")
        assert test in names_in(path), f"{fault} names {name}, which is not there"


def test_the_list_is_whole() -> None:
    assert list(FAULTS) == [f"F{n}" for n in range(1, 14)] + [f"S{n}" for n in range(1, 11)]
    chapter = (ROOT.parent / "docs/explain/tiers.md").read_text()
    for fault, (what, names) in FAULTS.items():
        assert f"| {fault} | {what} |" in chapter
        assert any(f"`{name.partition('::')[2]}`" in chapter for name in names)


# ---- F8: whatever cannot be loaded is computed


class Failing(Wrapped):
    """Fails the loads that a test chose: some frames are lost, some damaged, some not answered."""

    def __init__(self, inner: MemoryTier) -> None:
        super().__init__(inner)
        self.choices: list[str] = []
        self.seen = 0

    def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
        for item in items:
            choice = self.choices[self.seen % len(self.choices)] if self.choices else ""
            self.seen += 1
            if choice == "lost":
                self.inner.delete([item.key])
            elif choice == "damaged" and item.key in self.inner.frames:
                header, body = self.inner.frames[item.key]
                self.inner.frames[item.key] = header, b"\xff" + body[1:]
        return int(self.inner.submit_load(items, deadline_s=deadline_s))


@torch.no_grad()
def logits(tiers: list[Any], prompt: list[int], warm: bool) -> tuple[torch.Tensor, int]:
    """What the model says after a prompt, and how much of it was restored."""
    model = make_nano(attend=flowkv.attention)
    shape = flowkv.Geometry.uniform(layers=2, kv_heads=2, head_dim=8, page_size=8)
    kv = make_kv(shape, pages=12, tiers=tiers)
    reused = 0
    for text in [prompt, [7] * 80, prompt] if warm else [prompt]:  # the second drives out the first
        with kv.open(text) as seq:
            reused = seq.reused
            for step in kv.prefill([seq], chunk=8):
                model(step.tokens, step.positions)
            with kv.step([seq], [[3]]) as step:
                said = model(step.tokens, step.positions)
    kv.close()
    return said, reused


@given(choices=st.lists(st.sampled_from(("", "lost", "damaged")), min_size=1, max_size=12))
@settings(max_examples=15)
def test_F8_logits_are_those_of_no_cache(choices: list[str]) -> None:
    prompt = [int(token) for token in np.random.default_rng(5).integers(0, 50, 41)]
    tier = Failing(MemoryTier())
    tier.choices = choices
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain, _ = logits([], prompt, warm=False)
        said, reused = logits([tier], prompt, warm=True)
    finally:
        torch.set_num_threads(threads)
    assert said.numpy().tobytes() == plain.numpy().tobytes()
    assert reused == 40 or any(choices)
    assert tier.seen


# ---- S1: keys are compared whole


class Colliding(UserDict[bytes, Any]):
    """A dict that looks at the first byte of a key only, as a bad hash would."""

    def __getitem__(self, key: bytes) -> Any:
        return super().__getitem__(key[:1])

    def __setitem__(self, key: bytes, value: Any) -> None:
        super().__setitem__(key[:1], value)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and super().__contains__(key[:1])


def test_S1_a_collision_is_a_miss() -> None:
    tier = MemoryTier()
    tier.frames = Colliding()  # type: ignore[assignment]
    first = next(n for n in range(1000) if key_of(n)[0] == key_of("a")[0])
    stored(tier, ["a"])
    assert tier.contains([key_of(first)]) == [True]
    assert outcomes(get(tier, [first])) == [("miss", "key")]
    assert outcomes(get(tier, ["a"])) == [("hit", "")]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[list[Tier]]:
    found: list[Tier] = [
        MemoryTier(MIB),
        HostTier(MIB),
        DiskTier(tmp_path / "kv", MIB),
        SharedTier("faults", MIB, directory=tmp_path),
    ]
    yield found
    for tier in found:
        tier.close()


def test_S1_every_byte_of_a_key_counts(tiers: list[Tier]) -> None:
    key = key_of("a")
    others = [bytes(b ^ (at == n) for at, b in enumerate(key)) for n in range(len(key))]
    for tier in tiers:
        stored(tier, ["a"])
        assert not any(tier.contains(others))
        loads = [Load(other, memoryview(bytearray(8192)), LAYOUT) for other in others]
        done = answers(tier, tier.submit_load(loads), len(loads))
        assert set(outcomes(done)) == {("miss", "")}


# ---- S2: nobody learns what another tenant asked


def probes(victims: list[list[int]], wanted: list[list[int]]) -> tuple[list[tuple[Any, ...]], Any]:
    """What tenant B's questions cost while tenant A asked for these."""
    loads = [0]

    class Counting(Wrapped):
        def submit_load(self, items: Sequence[Load], *, deadline_s: float = 10.0) -> int:
            loads[0] += len(items)
            return int(self.inner.submit_load(items, deadline_s=deadline_s))

    kv = make_kv(simple(), pages=200, tiers=[Counting(MemoryTier())])
    for text in victims:
        published(kv, text, tenant="A")
    costs = []
    for text in wanted:
        with kv.open(text, tenant="B") as seq:
            computed = 0
            for step in kv.prefill([seq]):
                write(step)
                computed += int(step.counts.sum())
            costs.append((seq.reused, loads[0], computed))
    return costs, kv


SECRETS = [[word] * 24 for word in range(2, 12)]


def test_S2_work_does_not_depend_on_another_tenant() -> None:
    """What takes time is counted: pages reused, frames loaded, tokens computed."""
    with_them, kv = probes(SECRETS, SECRETS)
    kv.close()
    without, kv = probes([[99] * 24] * len(SECRETS), SECRETS)
    kv.close()
    assert with_them == without
    assert {reused for reused, _, _ in with_them} == {0}


@pytest.mark.deep
def test_S2_time_does_not_depend_on_another_tenant() -> None:
    """Ranks of 10,000 times, with and without what A asked: no more than chance would make."""
    kv = make_kv(simple(), pages=400, tiers=[MemoryTier()])
    known = [[word] * 24 for word in range(100)]
    for text in known:
        published(kv, text, tenant="A")
    times: list[tuple[float, bool]] = []
    chance = random.Random(4)
    gc.disable()
    try:
        for _ in range(10_000):
            same = chance.random() < 0.5
            text = chance.choice(known) if same else [chance.randrange(1000, 2000)] * 24
            start = time.perf_counter()
            kv.open(text, tenant="B").close()
            times.append((time.perf_counter() - start, same))
    finally:
        gc.enable()
    kv.close()
    order = np.argsort([seconds for seconds, _ in times])
    ranks = np.empty(len(times))
    ranks[order] = np.arange(len(times))
    mine = np.array([same for _, same in times])
    n, m = int(mine.sum()), int((~mine).sum())
    z = (ranks[mine].sum() - n * (n + m - 1) / 2) / np.sqrt(n * m * (n + m + 1) / 12)
    assert abs(z) < 2.58, f"p < 0.01: z = {z:.2f}"  # Mann and Whitney's test


# ---- S4, S5: no code from bytes, no ports


def intruder(source: str) -> Any:
    """A function that pretends to be a part of the package."""
    made: dict[str, Any] = {}
    exec(compile(source, f"{PACKAGE}intruder.py", "exec"), made)
    return made["run"]


PICKLED = pickle.dumps(Path("x"))
MARSHALLED = marshal.dumps(1)


@pytest.mark.parametrize(
    "source",
    [
        f"import pickle\ndef run(): pickle.loads({PICKLED!r})",
        f"import marshal\ndef run(): marshal.loads({MARSHALLED!r})",
        "def run(): eval('1 + 1')",
        "def run(): exec('1 + 1')",
        "def run(): compile('1 + 1', 'x', 'eval')",
    ],
)
def test_S4_the_audit_hook_bites(source: str) -> None:
    with pytest.raises(Forbidden, match=r"intruder\.py"):
        intruder(source)()


def test_S4_the_audit_hook_leaves_others_alone() -> None:
    assert pickle.loads(PICKLED) == Path("x")
    assert marshal.loads(MARSHALLED) == 1
    assert eval("1 + 1") == 2


def test_S5_no_port_is_opened_for_others() -> None:
    """Any test that makes FlowKV listen would fail like this; tests' own servers are no frames
    of ours."""
    run = intruder(
        "import socket\ndef run():\n with socket.socket() as s: s.bind(('127.0.0.1', 0))"
    )
    with pytest.raises(Forbidden, match=r"socket\.bind below .*intruder\.py"):
        run()
    with socket.create_server(("127.0.0.1", 0)):
        pass


# ---- S7: names lead nowhere

HOSTILE = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ("../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "a\0b", "a\nb", "con", "x" * 5000)
    ),
)


@in_files
@given(tenant=HOSTILE.filter(bool), model=HOSTILE.filter(bool))
def test_S7_hostile_names_make_no_paths(tmp_path: Path, tenant: str, model: str) -> None:
    home = tmp_path / "house"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700)
    try:
        kv = make_kv(simple(), namespace=model, disk=f"{home / 'kv'}:1MiB")
        published(kv, [1] * 24, tenant=tenant)
        kv.close()
    except (FlowKVError, ValueError):
        pass  # refused, with a sentence
    names = {path.relative_to(home).as_posix() for path in home.rglob("*")}
    assert names <= {"kv", "kv/lock", "kv/erased", "kv/journal", "kv/superblock.json"} | {
        name for name in names if name.startswith("kv/slab-") and name[8:].isdigit()
    }
    assert {path.name for path in tmp_path.iterdir()} == {"house"}


@given(
    key=st.one_of(
        st.binary(max_size=80),
        st.sampled_from((b"", b"../../../../etc/passwd", b"\0" * 31, b"k" * 33, b"k" * 100_000)),
    )
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_S7_hostile_keys_find_nothing(tiers: list[Tier], key: bytes) -> None:
    for tier in tiers:
        (done,) = answers(tier, tier.submit_load([Load(key, memoryview(bytearray(9)), LAYOUT)]), 1)
        assert done.outcome in (Outcome.MISS, Outcome.FAILED)
        assert tier.contains([key]) == [False]
        assert tier.delete([key]) == 0


# ---- S9: bounded


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
def test_S9_memory_is_bounded(tmp_path: Path) -> None:
    """Twenty thousand frames come and go; after the first third nothing grows any more."""
    found: list[Tier] = [
        HostTier(MIB),
        DiskTier(tmp_path / "kv", 2 * MIB),
        SharedTier("soak", MIB, directory=tmp_path),
    ]
    seen = []
    for step in range(20_000):
        for tier in found:
            stored(tier, [step])
            get(tier, [step, step + 1])
            if step >= 20:
                tier.delete([key_of(step - 20)])
        if step % 1000 == 999:
            gc.collect()
            seen.append(rss_bytes())
    for tier in found:
        tier.close()
    assert max(seen[7:]) - seen[6] < 4 * MIB, seen


# ---- S10: bytes that lie


@contextlib.contextmanager
def little_memory(most_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


HEADER = encode_header(key_of("a"), info_of(8192), body_of("a"))


@given(at=st.integers(32, 255), noise=st.binary(min_size=1, max_size=40))
@settings(max_examples=200)
def test_S10_frames(at: int, noise: bytes) -> None:
    """Fields of a header overwritten, and its digest made right again."""
    data = bytearray(HEADER)
    data[at : at + len(noise)] = noise
    data = data[: len(HEADER)]
    data[16:32] = digest_of(bytes(data[32:]))
    with little_memory(MIB), contextlib.suppress(BadFrame):
        header = decode_header(data)
        assert header.body_bytes < 1 << 80


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sample") / "kv"
    leave(DiskTier(directory, MIB), range(12))
    return directory


@in_files
@given(
    name=st.sampled_from(("superblock.json", "journal", "slab-00000003")),
    at=st.integers(0, 40_000),
    noise=st.one_of(st.binary(max_size=300), st.just(b"\xff" * 4096)),
    cut=st.integers(0, 50_000),
)
def test_S10_directories(
    sample: Path, tmp_path: Path, name: str, at: int, noise: bytes, cut: int
) -> None:
    directory = tmp_path / "kv"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(sample, directory)
    data = bytearray((directory / name).read_bytes())
    at %= len(data) + 1
    data[at : at + len(noise)] = noise
    (directory / name).write_bytes(data[: max(0, len(data) - cut % 20_000)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            with little_memory(16 * MIB):
                tier = DiskTier(directory, MIB)
        except StoreError:
            return
    get(tier, range(12))  # a hit must have the right bytes
    stored(tier, ["fresh"])
    tier.close()


@in_files
@given(noise=st.binary(max_size=6000), known=st.booleans())
def test_S10_archives(tmp_path: Path, noise: bytes, known: bool) -> None:
    path = tmp_path / "noise.kv"
    path.write_bytes((MAGIC + b"\1\0\0\0" if known else b"") + noise)
    found = []
    with (
        little_memory(4 * MIB),
        contextlib.suppress(FlowKVError),
        ArchiveReader(path, Envelope()) as archive,
    ):
        found = [frame for frame in archive.frames() if frame.header is not None]
    assert not found


def test_content_is_checked_by_tests_that_can_fail() -> None:
    kv = make_kv(simple())
    published(kv, [1] * 24)
    with kv.open([1] * 24) as seq, pytest.raises(AssertionError, match="is wrong by"):
        check_content(kv, seq, [2] * seq.length)
    kv.close()
    with pytest.raises(AssertionError), little_memory(100):
        bytearray(1000)
