"""The tier that NIXL moves, on the library itself and its plug-in for plain files."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from flowkv import Tier
from flowkv.testing import check_tier
from flowkv.tiers import open_tier
from flowkv.tiers.remote.tier import RemoteLimits, RemoteTier
from tests.inside import ConfigError, StoreError

from ..frames import hits, key_of, leave, stored

pytest.importorskip("nixl")

from tests.inside import Nixl, NixlTier

BRIEF = RemoteLimits(threads=2, close_s=2.0, open_s=5.0)
A, B = "a" * 64, "b" * 64


@pytest.mark.usefixtures("briefly")
def test_conformance(tmp_path: Path) -> None:
    numbers = itertools.count()

    def fresh(capacity_bytes: int) -> Tier:
        place = tmp_path / str(next(numbers))
        place.mkdir()
        return NixlTier(f"nixl://{place}", capacity_bytes, limits=BRIEF)

    check_tier(fresh, capacity_bytes=1 << 20)


def test_bytes_come_back_whole_and_in_parts(tmp_path: Path) -> None:
    store, sent = Nixl(f"nixl://{tmp_path}?plugin=POSIX"), os.urandom((1 << 20) + 7)
    store.put(A, memoryview(sent), 5.0)
    into = memoryview(bytearray(1 << 21))
    assert store.get(A, 0, into, 5.0) == sent
    assert store.get(A, 4099, into[:100], 5.0) == sent[4099:4199]
    assert store.get(A, len(sent), into, 5.0) == b"" and store.get(B, 0, into, 5.0) is None
    store.put(A, memoryview(b"new"), 5.0)
    assert store.get(A, 0, into, 5.0) == b"new" and store.exists([A, B], 5.0) == [True, False]
    assert [(one.name, one.n_bytes) for one in store.list(5.0)] == [(A, 3)]
    store.delete([A, B], 5.0)
    assert not list(store.list(5.0)) and not list(tmp_path.iterdir())
    store.close()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Nixl(f"nixl://{tmp_path}")
    monkeypatch.setattr(store._agent, "transfer", lambda _: "ERR")
    with pytest.raises(ConnectionError, match="ended as ERR"):
        store.put(A, memoryview(b"some"), 5.0)
    assert not list(tmp_path.iterdir())


def test_an_erasure_finds_what_a_killed_process_left(tmp_path: Path) -> None:
    tier = open_tier("nixl", path=f"nixl://{tmp_path}")
    stored(tier, ["one"])
    (tmp_path / f".{A}.0123456789abcdef").write_bytes(b"of a prompt")
    assert tier.erase([]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [key_of("one").hex()]


def test_frames_of_another_process_are_listed(tmp_path: Path) -> None:
    leave(open_tier("nixl", path=f"nixl://{tmp_path}"), ["one", "two"])
    again = open_tier("nixl", path=f"nixl://{tmp_path}")
    assert isinstance(again, RemoteTier) and again.contains([key_of("one")]) == [True]
    assert hits(again, ["one", "two"]) == 2


@pytest.mark.parametrize("uri", ["nixl://host/kv", "nixl:///", "nixl:///kv?plug=POSIX"])
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="nixl:///mnt/kv"):
        Nixl(uri)


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no directory"):
        Nixl(f"nixl://{tmp_path}/none")
    with pytest.raises(StoreError, match="cannot use its plug-in NONE"):
        Nixl(f"nixl://{tmp_path}?plugin=NONE")
