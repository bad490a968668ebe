"""Memory of a process's own: where it begins, what it holds, and in which pages it lies."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import HUGE_BYTES, address_of, own_memory


@given(st.integers(0, 3 * HUGE_BYTES))
def test_memory_is_zeros_of_the_size_asked_for(n_bytes: int) -> None:
    view = own_memory(n_bytes)
    assert len(view) == view.nbytes == n_bytes
    assert not view.readonly
    if n_bytes:
        assert address_of(view) % (4096 if n_bytes < HUGE_BYTES else HUGE_BYTES) == 0
        assert view[0] == view[-1] == 0
        view[0] = view[-1] = 7


def test_a_view_keeps_its_memory() -> None:
    part = own_memory(2 * HUGE_BYTES)[HUGE_BYTES : HUGE_BYTES + 4]
    part[:] = b"kept"
    gc.collect()
    assert bytes(part) == b"kept"


def test_what_does_not_exist_is_not_given() -> None:
    with pytest.raises((OSError, MemoryError)):
        own_memory(1 << 60)


def _bytes_of(field: str) -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith(field)).split()[1])


def test_large_memory_lies_in_huge_pages() -> None:
    """Which reads that bypass the page cache, copies and first writes gain most from."""
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not allowed.exists() or "[never]" in allowed.read_text():
        pytest.skip("this system gives no huge pages")
    before = _bytes_of("AnonHugePages")
    view = own_memory(16 * HUGE_BYTES)
    view[:] = bytes(len(view))
    assert _bytes_of("AnonHugePages") - before >= 8 * HUGE_BYTES
