"""What a disk delivered, opened: each frame in the way that it was wrapped, whoever reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowkv.tiers import Envelope, Load, Outcome, Store
from flowkv.tiers.disk import DiskTier
from tests.inside import SAMPLES, Keyring, Lossless, digest

from .frames import LAYOUT, answers, body_of, get, hits, info_of, key_of, outcomes, put, stored

SIZE = 64 << 10
COUNT = SAMPLES + 12


def shrinking(name: int) -> bytes:
    """16-bit values whose high bytes compress; of odd names, noise that does not."""
    if name % 2:
        return body_of(name, SIZE)
    low = body_of(name, SIZE // 2)
    return b"".join(bytes([byte, 63]) for byte in low)


def test_compressed_frames_beside_others_are_read_without_a_compressor(
    tmp_path: Path,
) -> None:
    """They were once taken for plain ones and dropped as foreign, in large batches."""
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


@pytest.mark.filterwarnings("ignore:of the frames in:UserWarning")
@pytest.mark.parametrize("way", ["to aead", "to xxh3", "no key"])
def test_frames_of_the_other_integrity_are_replaced_when_they_are_stored_anew(
    tmp_path: Path, way: str
) -> None:
    """Not a miss for ever, as they once were; but who has no key replaces nothing."""
    pytest.importorskip("cryptography")
    locked, plain = Envelope(integrity="aead", keyring=Keyring(bytes(32))), Envelope()
    before, after = (plain, locked) if way == "to aead" else (locked, plain)
    if way == "no key":
        after = Envelope(integrity="aead")
    tier = DiskTier(tmp_path, 1 << 20, envelope=before)
    stored(tier, ["a"])
    tier.close()
    tier = DiskTier(tmp_path, 1 << 20, envelope=after)
    assert outcomes(get(tier, ["a"])) == [("miss", "integrity")]
    assert outcomes(put(tier, ["a"])) == [("stored", "")]
    assert hits(tier, ["a"]) == (way != "no key") and tier.corrupt == 0
    tier.close()
    tier = DiskTier(tmp_path, 1 << 20, envelope=before)
    assert hits(tier, ["a"]) == (way == "no key")


def test_a_frame_whose_integrity_was_damaged_is_dropped(
    tmp_path: Path,
) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    stored(tier, ["a"])
    tier.close()
    (slab,) = tmp_path.rglob("slab-*")
    data = bytearray(slab.read_bytes())
    data[35] ^= 1
    slab.write_bytes(data)
    tier = DiskTier(tmp_path, 1 << 20)
    assert outcomes(get(tier, ["a"])) == [("miss", "integrity")]
    assert tier.corrupt == 1 and tier.contains([key_of("a")]) == [False]
    stored(tier, ["a"])
    assert hits(tier, ["a"]) == 1


def test_what_checks_large_batches_is_compiled_when_a_tier_is_open(
    tmp_path: Path,
) -> None:
    """Once it was compiled, for seconds, in the first restore on a machine, and then once more."""
    names = [f"{n}" for n in range(9)]
    for known in (False, True):  # frames whose headers are read first, and those of this process
        tier = DiskTier(tmp_path, 8 << 20)
        compiled = list(digest.check_all.signatures)
        assert compiled
        if not known:
            stored(tier, names)
        assert hits(tier, names) == len(names)
        assert list(digest.check_all.signatures) == compiled
        tier.close()
