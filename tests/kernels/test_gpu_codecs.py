"""The codecs on a real GPU: the very bytes of the oracle, within the bounds."""

from __future__ import annotations

import pytest
import torch

from flowkv.kernels import transcode
from flowkv.testing import check_codec
from tests.inside import codecs_KINDS as KINDS
from tests.inside import layout_CODECS as CODECS
from tests.kernels.codec_pages import DTYPES, EXTREMES, SHAPES, filled, layouts_of, moved

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_conformance_on_a_gpu(codec: str, dtype: str) -> None:
    check_codec(codec, dtype=dtype, device="cuda", max_examples=60)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_writes_the_oracles_bytes(shape: tuple, dtype: str) -> None:
    """Every codec into every other, all kinds of pages in one call."""
    layouts = layouts_of(shape, dtype)
    raw = layouts["raw"]
    kinds = (*KINDS, *EXTREMES)
    page = filled(raw, list(zip(kinds, kinds[3:] + kinds[:3], strict=True)), seed=3)
    for codec, old in layouts.items():
        first = moved(page.arena, page.source, raw, old, "reference")
        for new in layouts.values():
            expected = moved(first.arena, first.target, old, new, "reference")
            arena = torch.cat([first.arena, torch.zeros_like(expected.arena)]).cuda()
            lists = first.target.cuda(), expected.target.cuda()
            status = transcode(arena, *lists, old, new)
            assert torch.equal(status.cpu(), expected.status), codec
            got = expected._replace(arena=arena.cpu())
            assert torch.equal(got.pages(new), expected.pages(new)), codec
