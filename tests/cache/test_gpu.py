"""The runtime over a pool on a GPU: the same content by the same calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowkv import Geometry
from tests.cache.audit import audit
from tests.cache.toy import (
    advance,
    check_content,
    geometry,
    make_kv,
    opened,
    prefill,
    published,
    write,
)
from tests.inside import HostTier

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


def test_prompts_are_timed_by_the_device() -> None:
    """The host has queued their work long before it is done."""
    told = list[float]()
    with make_kv(SHAPE, pages=20) as kv:
        kv.planner.measured = lambda tokens, seconds, _: told.append(seconds)
        for number in range(4):
            seq = kv.open([number, *TEXT], reuse=False)
            for step in kv.prefill([seq], chunk=80):
                write(step, [0])
                torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second
            torch.cuda.synchronize()
            advance(kv, [seq], [[1]])
            seq.close()
            if not number:  # kernels are compiled: the step may be left out
                told.clear()
    assert len(told) == 3 and all(seconds > 0.04 for seconds in told)


@pytest.mark.parametrize(
    ("codec", "within"),
    [("kv8", 0.005), ("k8v4", 0.08), ("kv4c", 0.08), ("kv4h", 0.6), ("auto", 0.08)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_are_encoded_shared_and_come_back(
    codec: str, within: float, dtype: str, tmp_path: Path
) -> None:
    shape = Geometry.uniform(
        layers=2, kv_heads=2, head_dim=64, page_size=64, device="cuda:0", dtype=dtype
    )
    options = {"codec": codec, "recent_tokens": 0, "warm_tokens": 128, "pages": 40}
    place, slack = f"disk:{tmp_path / 'kv'}:64MiB", 0.0 if dtype == "float32" else 0.01
    kv = make_kv(shape, tiers=[HostTier(1 << 24), place], **options)
    seq = opened(kv, [1] * 400)
    twin = kv.fork(seq)
    kv.truncate(twin, 100)  # inside an encoded page
    check_content(kv, twin, [1] * 100, within=within + slack)
    advance(kv, [seq, twin], [[2] * 100, [3] * 100])
    audit(kv)
    check_content(kv, seq, [1] * 400 + [2] * 100, within=within + slack)
    check_content(kv, twin, [1] * 100 + [3] * 100, within=2 * within + slack)
    kv.suspend(twin)
    kv.defragment()
    kv.resume(twin)
    check_content(kv, twin, [1] * 100 + [3] * 100, within=2 * within + slack)
    seq.close()
    assert kv.stats()["devices"]["cuda:0"]["compression"] > 1.3
    kv.close()
    kv = make_kv(shape, tiers=[place], **options)
    with kv.open([1] * 400 + [2] * 101) as again:
        assert again.reused == 448
        prefill(kv, again)
        check_content(kv, again, [1] * 400 + [2] * 101, within=2 * within + slack)
        audit(kv)
