from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv.tiers.disk.files import FileIO
from flowkv.tiers.disk.journal import (
    CHARGE_BYTES,
    DELETED,
    PAGE_BYTES,
    RECORD_BYTES,
    RECORDS,
    STORED,
    Held,
    Journal,
    Record,
    Slot,
    pack_page,
    pack_record,
    peek_store_id,
    read_page,
    unpack_records,
)
from flowkv.tiers.disk.recover import replay

from .faulty import FaultyFiles
from .frames import info_of, key_of

STORE = bytes(range(16))


def record(seq: int, *, op: int = STORED, name: object = None, slot: int = 0) -> Record:
    held = Held(seq, Slot(3, slot), 1, info_of(8192, rank=0, world=1))
    return Record(op, key_of(seq if name is None else name), held)


def journal_of(path: Path, files: FileIO | None = None, *, write: bool = True) -> Journal:
    return Journal(files or FileIO(), str(path / "journal"), STORE, write=write)


def fill(journal: Journal, count: int) -> list[Record]:
    records = [record(journal.next_seq()) for _ in range(count)]
    for each in records:
        journal.append([each])
    return records


def test_sizes() -> None:
    assert len(pack_record(record(1))) == RECORD_BYTES
    assert len(pack_page(0, STORE, [])) == PAGE_BYTES
    assert PAGE_BYTES / RECORDS <= CHARGE_BYTES


@given(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**62),
    st.integers(2, 2**32 - 1),
    st.sampled_from([STORED, DELETED]),
)
def test_round_trip(seq: int, slot: int, granules: int, op: int) -> None:
    given_ = Record(
        op, key_of(seq), Held(seq, Slot(granules, slot), 1, info_of(4096, codec=2, fidelity=3))
    )
    assert list(unpack_records(pack_record(given_))) == [given_]


@pytest.mark.parametrize("count", [0, 1, RECORDS - 1, RECORDS, RECORDS + 1, 5 * RECORDS + 3])
def test_what_is_appended_is_read(tmp_path: Path, count: int) -> None:
    journal = journal_of(tmp_path)
    assert list(journal.read_new()) == []
    records = fill(journal, count)
    journal.close()
    journal = journal_of(tmp_path)
    assert list(journal.read_new()) == records
    assert journal.next_seq() == count + 1
    assert (journal.count, journal.bad_pages) == (count, 0)
    more = fill(journal, 30)
    journal.close()
    assert list(journal_of(tmp_path, write=False).read_new()) == records + more


def test_a_reader_follows(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    list(journal.read_new())
    reader = journal_of(tmp_path, write=False)
    rng, seen, all_ = random.Random(0), [], []
    for _ in range(60):
        all_ += fill(journal, rng.randrange(4))
        seen += reader.read_new()
        assert seen == all_
    assert not reader.replaced()
    journal.rewrite((each.key, each.held) for each in all_[-3:])
    assert reader.replaced()
    again = journal_of(tmp_path, write=False)
    assert list(again.read_new()) == all_[-3:]
    for each in (journal, reader, again):
        each.close()


@pytest.mark.parametrize("cut", [1, 63, 64, 300, 4095])
def test_a_torn_end_is_left_behind(tmp_path: Path, cut: int) -> None:
    journal = journal_of(tmp_path)
    list(journal.read_new())
    records = fill(journal, RECORDS + 5)
    journal.close()
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[: PAGE_BYTES + cut])
    journal = journal_of(tmp_path)
    found = list(journal.read_new())
    kept = max(0, min(5, (cut - 64) // RECORD_BYTES))
    assert found == records[: RECORDS + kept]
    more = fill(journal, 3)
    journal.close()
    assert list(journal_of(tmp_path, write=False).read_new()) == found + more


def test_flips_cost_one_record_at_most() -> None:
    records = [record(seq) for seq in range(RECORDS)]
    page = pack_page(7, STORE, map(pack_record, records))
    for bit in random.Random(0).sample(range(8 * PAGE_BYTES), 3000):
        damaged = bytearray(page)
        damaged[bit // 8] ^= 1 << bit % 8
        packed, state = read_page(memoryview(damaged), STORE)
        assert state == "bad"
        found = list(unpack_records(packed))
        assert len(found) >= RECORDS - 1
        assert set(found) <= set(records)


def test_pages_of_others_are_ignored() -> None:
    page = memoryview(pack_page(0, bytes(16), [pack_record(record(1))]))
    assert read_page(page, STORE) == (b"", "bad")
    assert read_page(memoryview(bytearray(PAGE_BYTES)), STORE) == (b"", "blank")


def test_records_that_make_no_sense_are_left_out() -> None:
    good = record(1)
    held = good.held
    for bad in (
        good._replace(op=3),
        good._replace(held=held._replace(stripes=0)),
        good._replace(held=held._replace(stripes=1 << 20)),
        good._replace(held=held._replace(slot=Slot(2, 0))),
        good._replace(held=held._replace(info=held.info._replace(fidelity=9))),
        good._replace(held=held._replace(info=held.info._replace(stripe_bytes=1 << 60))),
    ):
        assert list(unpack_records(pack_record(bad) + pack_record(good))) == [good]


def test_an_append_that_fails(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = journal_of(tmp_path, files)
    list(journal.read_new())
    kept = fill(journal, RECORDS - 1)
    files.at, files.left, files.mode = len(files.done), 2, "torn"
    with pytest.raises(OSError, match="torn"):
        journal.append([record(journal.next_seq()) for _ in range(3)])
    deleted = [record(journal.next_seq(), op=DELETED) for _ in range(2)]
    with pytest.raises(OSError, match="torn"):
        journal.append(deleted, keep=True)
    more = fill(journal, 2)
    journal.close()
    journal = journal_of(tmp_path)
    assert list(journal.read_new()) == [*kept, *deleted, *more]
    assert journal.count == RECORDS + 3
    journal.close()


def test_a_rewrite_that_fails_changes_nothing(tmp_path: Path) -> None:
    for operation in range(8):
        files = FaultyFiles()
        journal = journal_of(tmp_path, files)
        there = list(journal.read_new())
        there += fill(journal, 3)
        files.at = len(files.done) + operation
        try:
            journal.rewrite((each.key, each.held) for each in there)
        except OSError as error:
            assert error.strerror == "No space left on device"
        files.armed = False
        there += fill(journal, 30)
        journal.close()
        assert not (tmp_path / "journal.tmp").exists()
        journal = journal_of(tmp_path, write=False)
        assert list(journal.read_new()) == there
        journal.close()


def test_the_store_id_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert peek_store_id(FileIO(), str(path)) is None
    path.write_bytes(bytes(PAGE_BYTES) + pack_page(1, STORE, []))
    assert peek_store_id(FileIO(), str(path)) == STORE
    path.write_bytes(b"x" * 10_000)
    assert peek_store_id(FileIO(), str(path)) is None


def test_replay() -> None:
    index: dict[bytes, Held] = {}
    records = [
        record(1, name="a", slot=0),
        record(2, name="b", slot=1),
        record(3, name="a", op=DELETED, slot=0),
        record(4, name="c", slot=0),
        record(5, name="d", slot=1),  # the deletion of "b" was lost
        record(6, name="c", slot=2),  # and that of "c"
        record(7, name="e", slot=0),
        record(8, name="x", op=DELETED, slot=9),
    ]
    replay(records, index, {})
    assert {key: held.slot.number for key, held in index.items()} == {
        key_of("d"): 1,
        key_of("c"): 2,
        key_of("e"): 0,
    }
    assert list(index) == [key_of("d"), key_of("c"), key_of("e")]
