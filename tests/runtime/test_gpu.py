"""The runtime over a pool on a GPU: the same content by the same calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowkv.tiers.host import HostTier
from tests.runtime.audit import audit
from tests.runtime.toy import advance, check_content, geometry, make_kv, opened, published

pytestmark = pytest.mark.gpu
SHAPE = geometry(device="cuda:0")
TEXT = list(range(60))


def test_pages_live_move_and_come_back(tmp_path: Path) -> None:
    kv = make_kv(SHAPE, pages=20, tiers=[HostTier(1 << 22), f"disk:{tmp_path / 'kv'}:64MiB"])
    seq = opened(kv, TEXT)
    twin = kv.fork(seq)
    advance(kv, [seq, twin], [[1, 2, 3], [4] * 20])
    check_content(kv, seq, [*TEXT, 1, 2, 3])
    check_content(kv, twin, TEXT + [4] * 20)
    kv.suspend(twin)
    seq.close()
    for number in range(70, 76):
        published(kv, [number] * 40)
        audit(kv)
    kv.resume(twin)
    check_content(kv, twin, TEXT + [4] * 20)
    twin.close()
    kv.defragment()
    for number in range(70, 76):
        with kv.open([number] * 41) as again:
            assert again.reused == 40
            check_content(kv, again, [number] * 40)
    kv.close()
    kv = make_kv(SHAPE, pages=20, tiers=[f"disk:{tmp_path / 'kv'}:64MiB"])
    with kv.open(TEXT) as again:
        assert again.reused == 56
        check_content(kv, again, TEXT[:56])
    kv.close()
