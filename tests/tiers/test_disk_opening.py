"""What a disk delivered, opened: each frame in the way that it was wrapped, whoever reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowkv.tiers.base import Load, Outcome, Store
from flowkv.tiers.disk import DiskTier, opened
from flowkv.tiers.envelope import Envelope
from flowkv.tiers.lossless import SAMPLES, Lossless

from .frames import LAYOUT, answers, body_of, info_of, key_of

SIZE = 64 << 10
COUNT = SAMPLES + 12


def shrinking(name: int) -> bytes:
    """16-bit values whose high bytes compress; of odd names, noise that does not."""
    if name % 2:
        return body_of(name, SIZE)
    low = body_of(name, SIZE // 2)
    return b"".join(bytes([byte, 63]) for byte in low)


@pytest.mark.parametrize("compiled", [True, False])
def test_compressed_frames_beside_others_are_read_without_a_compressor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """They were once taken for plain ones and dropped as foreign, in large batches."""
    monkeypatch.setattr(opened, "COMPILED_BYTES", 0 if compiled else 1 << 60)
    packs = Lossless(lambda: 1.0, decode_bytes_per_s=lambda: 1e12)
    writer = DiskTier(tmp_path, 8 << 20, threads=0, envelope=Envelope(lossless=packs))
    stores = [
        Store(key_of(name), info_of(SIZE), memoryview(shrinking(name))) for name in range(COUNT)
    ]
    for store in stores:  # one by one, so that the first are samples
        (done,) = answers(writer, writer.submit_store([store]), 1)
        assert done.outcome is Outcome.STORED
    writer.close()

    reader = DiskTier(tmp_path, 8 << 20, threads=0)
    wishes = [Load(store.key, memoryview(bytearray(SIZE)), LAYOUT) for store in stores]
    done = answers(reader, reader.submit_load(wishes), COUNT)
    assert [(answer.outcome, answer.reason) for answer in done] == [(Outcome.HIT, "")] * COUNT
    assert all(wish.target == store.body for wish, store in zip(wishes, stores, strict=True))
    packed = [entry for entry in reader.scan() if entry.n_bytes < SIZE]
    assert 0 < len(packed) < COUNT, "some frames must be compressed, and some not"
    assert reader.corrupt == 0
    reader.close()
