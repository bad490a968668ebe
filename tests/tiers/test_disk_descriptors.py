"""Opening a directory takes files and threads, of which none stay when it fails."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from flowkv.tiers.disk import DiskTier
from tests.inside import StoreError, open_engine, tiers_io

from .frames import hits, stored

MIB = 1 << 20


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def spare() -> Iterator[None]:
    """Puts the limit of open files back."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_failed_opening_leaves_no_file_and_no_thread(tmp_path: Path) -> None:
    DiskTier(tmp_path, MIB, threads=0).close()
    (tmp_path / "journal").unlink()
    os.mkfifo(tmp_path / "journal")
    before = files(), threading.active_count()
    for _ in range(3):
        with pytest.raises(StoreError, match="cannot be opened"):
            DiskTier(tmp_path, MIB)
    assert (files(), threading.active_count()) == before


@pytest.mark.usefixtures("uncollected")
def test_an_opening_without_memory_to_compile_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiskTier(tmp_path, MIB, threads=0).close()
    before = files(), threading.active_count()
    monkeypatch.setattr("flowkv.compiled.digest.compile_digest", Mock(side_effect=MemoryError))
    with pytest.raises(StoreError, match="cannot be opened"):
        DiskTier(tmp_path, MIB)
    assert (files(), threading.active_count()) == before


@pytest.mark.usefixtures("spare", "uncollected")
def test_where_few_files_may_be_opened_threads_do_the_work(tmp_path: Path) -> None:
    with_ring = DiskTier(tmp_path, MIB, threads=0)
    usual = with_ring.engine
    with_ring.close()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, opened = files(), set()
    for left in range(32):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + left, hard))
        try:
            tier = DiskTier(tmp_path, MIB, threads=0)
        except StoreError:
            assert left < 8, "a directory takes no more"
        else:
            opened.add(tier.engine)
            stored(tier, [left])
            assert hits(tier, [left]) == 1
            tier.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 64, hard))
        assert files() == before
    assert opened == {usual, "threads" if usual == "io_uring" else usual}


@pytest.mark.usefixtures("spare")
def test_the_ladder_says_why_it_takes_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_io, "SPARE", 1 << 62)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    engine = open_engine()
    try:
        assert engine.name == "threads" and (
            "ulimit -n" in engine.why or "no io_uring" in engine.why
        )
    finally:
        engine.close()
