"""Forgetting erases on every tier, and proves it: bytes, not only entries, are gone."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowkv import KV
from flowkv.testing import MemoryTier
from flowkv.tiers.remote.tier import RemoteLimits, RemoteTier
from flowkv.tiers.shared import SharedTier
from tests.cache.audit import audit, audit_empty
from tests.cache.fakes import Deferred, Wrapped, lasting
from tests.cache.toy import PAGE, check_content, make_kv, opened, published, simple
from tests.inside import Breaker, StoreError, SystemClock
from tests.tiers.remote.faulty import FaultyBackend
from tests.tiers.remote.servers_redis import redis_server

P, Q = [1] * 24, [2] * 24


def kv_over(*tiers: Any, **options: Any) -> KV:
    return make_kv(simple(), pages=16, tiers=tiers, **options)


def plaintext(kv: KV, tokens: list[int], **options: Any) -> list[bytes]:
    """A piece of each page of a prompt, as it lies in the pool."""
    with kv.open([*tokens, 0], **options) as seq:
        pages = kv.planner.tables.pages[0][seq.row, : len(tokens) // PAGE].tolist()
        pool = kv.planner.store.pool(0)
        return [bytes(pool.page_bytes(page, 4096).numpy()[:256]) for page in pages]


KEPT = ("--appendonly", "yes", "--appendfsync", "always")
"""Has Redis write to its files before it answers; else a slow disk holds that up for seconds."""


def holds(directory: Path, pieces: list[bytes]) -> list[bool]:
    content = b"".join(f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file())
    return [piece in content for piece in pieces]


@pytest.fixture
def disk(tmp_path: Path) -> str:
    return f"disk:{tmp_path / 'kv'}:8MiB"


# ---- disk


def test_the_bytes_of_a_tenant_are_gone_from_the_disk(disk: str, tmp_path: Path) -> None:
    kv = kv_over(disk, lossless="off")
    published(kv, P, tenant="alice", tag=1)
    published(kv, Q, tenant="bob", tag=2)
    hers = plaintext(kv, P, tenant="alice")
    his = plaintext(kv, Q, tenant="bob")
    assert kv.flush() and holds(tmp_path, hers + his) == [True] * 6
    assert kv.forget(tenant="alice") == 3
    assert holds(tmp_path, hers) == [False] * 3 and holds(tmp_path, his) == [True] * 3
    with kv.open([*Q, 0], tenant="bob") as seq:
        check_content(kv, seq, Q, tag=2)
    audit(kv)
    assert kv.forget(tenant="alice") == 0
    kv.close()
    assert holds(tmp_path, hers) == [False] * 3


def test_what_was_evicted_before_is_erased_too(disk: str, tmp_path: Path) -> None:
    """A frame that left a tier leaves its bytes in a free slot; forgetting clears those."""
    kv = kv_over(disk, lossless="off")
    published(kv, P, tenant="alice", tag=1)
    hers = plaintext(kv, P, tenant="alice")
    kv.flush()
    (tier,) = kv.planner.store.stack.tiers
    assert tier.delete([entry.key for entry in tier.scan()]) == 3
    assert holds(tmp_path, hers) == [True] * 3
    kv.forget(tenant="alice")
    assert holds(tmp_path, hers) == [False] * 3


@pytest.mark.parametrize("how", ["prompt", "model"])
def test_prompts_and_models_are_erased_like_tenants(disk: str, tmp_path: Path, how: str) -> None:
    kv = kv_over(disk, lossless="off")
    published(kv, P)
    published(kv, Q, tag=3)
    pieces, others = plaintext(kv, P), plaintext(kv, Q)
    kv.flush()
    assert (kv.forget(P) if how == "prompt" else kv.invalidate()) == (3 if how == "prompt" else 6)
    assert holds(tmp_path, pieces) == [False] * 3
    assert holds(tmp_path, others) == [how == "prompt"] * 3


def test_an_encrypted_disk_never_holds_plaintext(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    secret = secrets.token_hex(32)
    options = {"integrity": "aead", "secret": secret, "lossless": "off"}
    kv = kv_over(f"disk:{tmp_path / 'kv'}:8MiB", **options)
    published(kv, P)
    pieces = plaintext(kv, P)
    kv.flush()
    kv.close()
    assert holds(tmp_path, pieces) == [False] * 3
    for other, reused in ((secret, 24), (secrets.token_hex(32), 0)):
        with warnings.catch_warnings(record=True, action="always") as told:
            again = kv_over(f"disk:{tmp_path / 'kv'}:8MiB", **options | {"secret": other})
        with again, again.open([*P, 0]) as seq:
            assert seq.reused == reused
            check_content(again, seq, P[:reused])
            (tier,) = again.stats()["tiers"].values()
        assert (tier["locked"] > 0, len(told)) == ((reused == 0), (reused == 0))


def test_frames_of_other_secrets_are_counted_and_told_once(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    place = f"disk:{tmp_path / 'kv'}:8MiB"
    ours, theirs = ({"integrity": "aead", "secret": letter * 64} for letter in "ab")

    def opened_over(**options: Any) -> tuple[KV, list[str]]:
        with warnings.catch_warnings(record=True, action="always") as told:
            return kv_over(place, **options), [str(one.message) for one in told]

    for tenants, options in (("xy", ours), ("z", theirs)):  # three pages of each tenant
        kv, _ = opened_over(**options)
        for tenant in tenants:
            published(kv, P, tenant=tenant)
        kv.close()
    for options, locked in ((ours, 3), (theirs, 6), ({}, 9)):
        kv, told = opened_over(**options)
        with kv:
            (tier,) = kv.stats()["tiers"].values()
            shown = kv.metrics.prometheus()
        (level,) = re.findall(r"^flowkv_tier_locked_frames\{.*\} (\d+)", shown, re.MULTILINE)
        assert (tier["locked"], int(level)) == (locked, locked)
        assert len(told) == 1 and f", {locked} are encrypted with" in told[0]


# ---- tiers that others write to


def test_frames_that_others_wrote_are_erased(tmp_path: Path) -> None:
    ours = SharedTier("erasure", 1 << 20, directory=tmp_path)
    theirs = SharedTier("erasure", 1 << 20, directory=tmp_path)
    kv, other = kv_over(Wrapped(ours, kind="disk")), kv_over(Wrapped(theirs, kind="disk"))
    published(kv, P, tenant="alice", tag=1)
    kv.flush()
    for prompt in (Q, [3] * 16):
        published(other, prompt, tenant="alice", tag=1)
    published(other, Q, tenant="bob", tag=2)
    other.flush()
    pieces = plaintext(other, Q, tenant="alice")
    assert holds(tmp_path, pieces) == [True] * 3 and len(list(ours.scan())) == 11
    assert kv.forget(tenant="alice") == 8
    assert len(list(theirs.scan())) == 3 and holds(tmp_path, pieces) == [False] * 3
    audit(kv)
    with kv.open([*Q, 0], tenant="bob") as seq:
        check_content(kv, seq, Q[: seq.length], tag=2)
        assert seq.reused == 24


def test_prompts_that_others_continued_are_erased_with_it() -> None:
    shared = MemoryTier(name="pool")
    kv, other = (kv_over(Wrapped(shared, kind="remote", shared=True)) for _ in range(2))
    published(kv, P)
    published(other, P + Q)
    other.flush()
    kv.flush()
    assert len(shared.frames) == 6
    assert kv.forget(P) == 6 and not shared.frames
    audit_empty(kv)


def test_what_may_continue_less_than_a_page_is_erased_after_a_restart(disk: str) -> None:
    kv = kv_over(disk)
    for tenant in ("alice", "bob"):
        published(kv, P, tenant=tenant)
    kv.close()
    kv = kv_over(disk)
    assert kv.forget(P[:3], tenant="alice") == 3
    assert [kv.explain([*P, 0], tenant=tenant).known for tenant in ("alice", "bob")] == [0, 24]


def test_a_server_proves_it_too(tmp_path: Path) -> None:
    """A real redis-server, where there is one: its keys are gone, and from its files too."""
    pytest.importorskip("redis")
    with redis_server(tmp_path / "server", *KEPT) as server:
        kv = kv_over(server.uri, lossless="off")
        published(kv, P, tenant="alice", tag=1)
        published(kv, Q, tenant="bob", tag=2)
        assert kv.flush()
        (tier,) = kv.planner.store.stack.tiers
        assert len(list(tier.scan())) == 6
        pieces = plaintext(kv, P, tenant="alice")
        assert holds(tmp_path, pieces) == [True] * 3
        assert kv.forget(tenant="alice") == 3 and len(list(tier.scan())) == 3
        assert holds(tmp_path, pieces) == [False] * 3
        kv.close()


# ---- tiers that cannot prove it


def _moved(directory: Path) -> None:
    directory.rename(directory.with_name("away"))


def _replaced(directory: Path) -> None:
    _moved(directory)
    directory.mkdir(0o700)


def _copied(directory: Path) -> None:
    _moved(directory)
    shutil.copytree(directory.with_name("away"), directory)


def _no_journal(directory: Path) -> None:
    (directory / "journal").rename(directory.with_name("journal"))
    os.mkfifo(directory / "journal")


def _no_slab(directory: Path) -> None:
    for slab in directory.glob("slab-*"):
        slab.rename(directory.with_name(slab.name))


@pytest.mark.filterwarnings("ignore:.* stores no page now")
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("how", ["prompt", "tenant", "model"])
@pytest.mark.parametrize("harm", [_moved, _replaced, _copied, _no_journal, _no_slab])
def test_a_disk_that_lost_its_files_proves_nothing(
    disk: str, tmp_path: Path, harm: Callable[[Path], None], how: str, noticed: bool
) -> None:
    kv = kv_over(disk, lossless="off")
    published(kv, P)
    pieces = plaintext(kv, P)
    assert kv.flush()
    harm(tmp_path / "kv")
    if noticed:
        published(kv, Q, tag=2)
        kv.flush()
    with pytest.raises(StoreError, match="not proven to be erased: disk:"):
        {
            "prompt": lambda: kv.forget(P),
            "tenant": lambda: kv.forget(tenant=""),
            "model": kv.invalidate,
        }[how]()
    assert holds(tmp_path, pieces) == [True] * 3 or (harm is _no_slab and not noticed)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_disk_that_lost_its_lock_alone_erases_and_proves_it(
    disk: str, tmp_path: Path, noticed: bool
) -> None:
    kv = kv_over(disk, lossless="off")
    published(kv, P)
    pieces = plaintext(kv, P)
    assert kv.flush()
    (tmp_path / "kv" / "lock").unlink()
    if noticed:
        published(kv, Q, tag=2)
        kv.flush()
    assert kv.forget(P) == 3 and holds(tmp_path, pieces) == [False] * 3


class Stubborn(Wrapped):
    """Erases nothing, and may say so."""

    silent = False

    def erase(self, keys: Sequence[bytes]) -> int:
        if not self.silent:
            raise StoreError("stubborn lost its connection", "Try again")
        return len(keys)


def test_frames_that_others_sent_to_an_engine_are_erased_or_named() -> None:
    engine = FaultyBackend()
    limits = RemoteLimits(open_s=0.3, erase_s=1.0)
    kv, other = (kv_over(RemoteTier(engine, name=name, limits=limits)) for name in "ab")
    published(other, P)
    assert other.flush() and len(engine.objects) == 3
    engine.always["get"] = "error"
    with pytest.raises(StoreError, match=r"a cannot list its frames \(the headers of 3 frames"):
        kv.forget(tenant="")
    engine.always["list"] = "error"
    with pytest.raises(StoreError, match="a cannot list its frames"):
        kv.forget(tenant="")
    engine.release()
    kv.planner.store.stack.tiers[0]._breaker = Breaker(SystemClock())
    assert len(engine.objects) == 3 and kv.forget(tenant="") == 3
    assert list(engine.objects) == ["erased"]  # no frame: what tells other nodes


@pytest.mark.parametrize("within", ["load", "listing"])
def test_frames_that_were_damaged_on_their_way_are_erased_too(within: str) -> None:
    """They are whole in the engine: all others find them again."""
    engine, quiet = FaultyBackend(), RemoteLimits(every_s=1e6)
    early, writer = (kv_over(RemoteTier(engine, limits=quiet)) for _ in range(2))
    published(writer, P)
    assert writer.flush()
    late = kv_over(RemoteTier(engine, limits=quiet))
    kv, engine.plan["get"] = early, ["", "corrupt"]  # the log of erasures is read first
    if within == "load":
        kv, engine.plan["get"] = late, ["", *["corrupt"] * 3]
        with kv.open([*P, 0]) as seq:
            assert seq.reused < 24
    assert kv.forget(tenant="") == 3 and [*engine.objects] == ["erased"]


@pytest.mark.parametrize("silent", [False, True])
def test_a_tier_that_cannot_prove_it_is_named_and_all_others_erase(silent: bool) -> None:
    near, far = MemoryTier(name="near"), MemoryTier(name="far")
    stubborn = Stubborn(MemoryTier(name="stubborn"), kind="disk", silent=silent)
    kv = kv_over(near, stubborn, Wrapped(far, kind="disk"))
    published(kv, P)
    kv.flush()
    store = kv.planner.store
    for block in list(store.index):
        for number in (0, 2):
            assert not store.eviction.store_pages([block], number)
    kv.flush()
    assert len(near.frames) == len(stubborn.frames) == len(far.frames) == 3
    message = "3 of them still, or again" if silent else "stubborn lost its connection"
    with pytest.raises(StoreError, match=f"3 blocks are forgotten.*stubborn.*{message}"):
        kv.forget(tenant="")
    assert not near.frames and not far.frames and len(stubborn.frames) == 3
    audit_empty(kv)
    assert kv.explain([*P, 0]).known == 0
    with pytest.raises(StoreError, match="stubborn"):
        kv.invalidate()
    stubborn.erase = stubborn.inner.erase
    assert kv.forget(P) == 3 and kv.invalidate() == 0 and not stubborn.frames


def test_what_is_still_being_stored_is_not_proven_gone_and_goes_later() -> None:
    disk = Deferred(lasting())
    kv = kv_over(disk, load_deadline_s=0.05)
    published(kv, P)
    disk.poll, poll = (lambda timeout_s=0.0: []), disk.poll
    with pytest.raises(StoreError, match="lasting has not answered yet"):
        kv.forget(P)
    assert kv.explain([*P, 0]).known == 0
    disk.poll = poll
    kv.flush()
    assert not disk.frames, "erased once it was stored"
    audit_empty(kv)


def test_open_sequences_keep_their_pages_when_a_tier_fails() -> None:
    stubborn = Stubborn(MemoryTier(name="stubborn"), kind="disk")
    kv = kv_over(stubborn)
    seq = opened(kv, P)
    kv.flush()
    with pytest.raises(StoreError):
        kv.forget(P)
    check_content(kv, seq, P)
    assert not seq.publishable
    seq.close()
    audit_empty(kv)
