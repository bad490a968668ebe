from __future__ import annotations

import errno
import hashlib
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import (
    AES_256_GCM,
    CHARGE_BYTES,
    DELETED,
    NH_128,
    RECORD_BYTES,
    RECORDS,
    ROW,
    STORED,
    XXH3_128,
    FileIO,
    Held,
    Index,
    Journal,
    Record,
    Slot,
    newest,
    pack_page,
    pack_record,
    peek_store_id,
    read_page,
    sensible,
    unpack_row,
)
from tests.inside import journal_PAGE_BYTES as PAGE_BYTES
from tests.inside import journal_Rows as Rows

from .crashing import BLOCK_BYTES, MemoryFiles
from .faulty import FaultyFiles
from .frames import info_of, key_of

STORE = bytes(range(16))


def record(seq: int, *, op: int = STORED, name: object = None, slot: int = 0) -> Record:
    info = info_of(8192, rank=0, world=1)
    held = Held(seq, Slot(3, slot), 1, info, 4096 + 8192, XXH3_128)
    return Record(op, key_of(seq if name is None else name), held)


def records_of(rows: Rows) -> list[Record]:
    packed = rows.tobytes()
    return [unpack_row(packed, row) for row in range(len(rows))]


def unpack(packed: bytes) -> list[Record]:
    return records_of(sensible(np.frombuffer(packed, ROW)))


def read_new(journal: Journal) -> list[Record]:
    return records_of(journal.read_new())


def opened(files: FileIO, path: str, *, write: bool) -> Journal:
    return Journal(files, path, STORE, write=write, capacity_bytes=1 << 62)


def journal_of(path: Path, files: FileIO | None = None, *, write: bool = True) -> Journal:
    return opened(files or FileIO(), str(path / "journal"), write=write)


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
    st.integers(0, 2**40 - 1),
    st.integers(2, 2**23 - 1),
    st.sampled_from([STORED, DELETED]),
    st.sampled_from([XXH3_128, AES_256_GCM, NH_128]),
)
def test_round_trip(seq: int, slot: int, granules: int, op: int, integrity: int) -> None:
    given_ = Record(
        op,
        key_of(seq),
        Held(
            seq,
            Slot(granules, slot),
            1,
            info_of(4096, codec=2, fidelity=3),
            stored_bytes=8192 if integrity != AES_256_GCM else 4096 + 77,
            integrity=integrity,
            lossless=integrity == AES_256_GCM,
        ),
    )
    assert unpack(pack_record(given_)) == [given_]


@pytest.mark.parametrize("count", [0, 1, RECORDS - 1, RECORDS, RECORDS + 1, 5 * RECORDS + 3])
def test_what_is_appended_is_read(tmp_path: Path, count: int) -> None:
    journal = journal_of(tmp_path)
    assert read_new(journal) == []
    records = fill(journal, count)
    journal.close()
    journal = journal_of(tmp_path)
    assert read_new(journal) == records
    assert journal.next_seq() == count + 1
    assert (journal.count, journal.bad_pages) == (count, 0)
    more = fill(journal, 30)
    journal.close()
    assert read_new(journal_of(tmp_path, write=False)) == records + more


def test_a_reader_follows(tmp_path: Path) -> None:
    journal = journal_of(tmp_path)
    read_new(journal)
    reader = journal_of(tmp_path, write=False)
    rng, seen, all_ = random.Random(0), [], []
    for _ in range(60):
        all_ += fill(journal, rng.randrange(4))
        seen += read_new(reader)
        assert seen == all_
    assert not reader.replaced()
    journal.rewrite(map(pack_record, all_[-3:]))
    assert reader.replaced()
    again = journal_of(tmp_path, write=False)
    assert read_new(again) == all_[-3:]
    for each in (journal, reader, again):
        each.close()


@pytest.mark.parametrize("cut", [1, 63, 64, 300, 4095])
def test_a_torn_end_is_left_behind(tmp_path: Path, cut: int) -> None:
    journal = journal_of(tmp_path)
    read_new(journal)
    records = fill(journal, RECORDS + 5)
    journal.close()
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[: PAGE_BYTES + cut])
    journal = journal_of(tmp_path)
    found = read_new(journal)
    kept = max(0, min(5, (cut - 64) // RECORD_BYTES))
    assert found == records[: RECORDS + kept]
    more = fill(journal, 3)
    journal.close()
    assert read_new(journal_of(tmp_path, write=False)) == found + more


def test_flips_cost_one_record_at_most() -> None:
    records = [record(seq) for seq in range(RECORDS)]
    page = pack_page(7, STORE, map(pack_record, records))
    for bit in random.Random(0).sample(range(8 * PAGE_BYTES), 3000):
        damaged = bytearray(page)
        damaged[bit // 8] ^= 1 << bit % 8
        packed, state = read_page(memoryview(damaged), STORE)
        assert state == "bad"
        found = unpack(packed)
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
        assert unpack(pack_record(bad) + pack_record(good)) == [good]


def test_an_append_that_fails(tmp_path: Path) -> None:
    files = FaultyFiles()
    journal = journal_of(tmp_path, files)
    read_new(journal)
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
    assert read_new(journal) == [*kept, *deleted, *more]
    assert journal.count == RECORDS + 3
    journal.close()


def half_full(space: int, *, count: int = 40) -> tuple[MemoryFiles, Journal, list[Record]]:
    """A journal of one page, behind which there is room for so many; its next append fails."""
    files = MemoryFiles()
    journal = opened(files, PATH, write=True)
    read_new(journal)
    kept = fill(journal, 5)
    files.space_bytes = files.used_bytes() + BLOCK_BYTES * space
    with pytest.raises(OSError, match="No space"):
        journal.append([record(journal.next_seq(), slot=n) for n in range(count)])
    return files, journal, kept


PATH = "/memory/journal"


@pytest.mark.parametrize("space", [0, 1, 2])
def test_nothing_stays_of_an_append_that_failed(space: int) -> None:
    files, journal, kept = half_full(space, count=60)
    later = [record(journal.next_seq(), name=n, slot=n) for n in range(3)]
    journal.append(later)
    journal.close()
    again = opened(files, PATH, write=False)
    assert read_new(again) == [*kept, *later]
    assert again.bad_pages == 0


@pytest.mark.parametrize("space", [0, 1, 2])
def test_nothing_stays_where_no_append_follows(space: int) -> None:
    files, journal, kept = half_full(space, count=60)
    journal.repair()
    journal.repair()
    journal.close()
    again = opened(files, PATH, write=False)
    assert read_new(again) == kept
    assert again.bad_pages == 0


def test_what_was_to_be_kept_is_written_when_it_can_be() -> None:
    files, journal, kept = half_full(1)
    gone = [record(journal.next_seq(), op=DELETED) for _ in range(50)]
    with pytest.raises(OSError, match="No space"):
        journal.append(gone, keep=True)
    files.space_bytes = 1 << 40
    journal.repair()
    journal.close()
    assert read_new(opened(files, PATH, write=False)) == [*kept, *gone]


def test_an_append_counts_once_what_failed_before_is_gone() -> None:
    files, journal, kept = half_full(1)

    def refused(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "truncate", refused)
        with pytest.raises(OSError, match="no"):
            journal.append([record(journal.next_seq())])
    later = fill(journal, 1)
    journal.close()
    assert read_new(opened(files, PATH, write=False)) == [*kept, *later]


def test_a_reader_sees_that_records_were_taken_back() -> None:
    files, journal, kept = half_full(1)
    reader = opened(files, PATH, write=False)
    assert len(read_new(reader)) > len(kept)
    assert not reader.rewound()
    later = fill(journal, 3)
    assert reader.rewound() and not reader.replaced()
    again = opened(files, PATH, write=False)
    assert read_new(again) == kept + later
    files.space_bytes = 1 << 40
    for _ in range(60):
        assert not again.rewound()
        assert read_new(again) == fill(journal, 0)
        more = fill(journal, 1)
        assert not again.rewound()
        assert read_new(again) == more


@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_records_are_read_in_the_order_of_their_numbers(seed: int, count: int) -> None:
    """In whatever order failed writes, or an older version, left them."""
    rng, files = random.Random(seed), MemoryFiles()
    records = [
        record(seq, name=rng.randrange(9), slot=rng.randrange(9), op=rng.choice((STORED, DELETED)))
        for seq in range(1, count + 1)
    ]
    shuffled = rng.sample(records, count)
    pages = [shuffled[at : at + RECORDS] for at in range(0, count, RECORDS)]
    fd = files.open(PATH, write=True)
    for number, page in enumerate(pages):
        files.write(fd, [pack_page(number, STORE, map(pack_record, page))], number * PAGE_BYTES)
    journal = opened(files, PATH, write=True)
    assert read_new(journal) == records
    assert journal.next_seq() == count + 1


def test_numbers_are_above_those_of_records_that_another_version_reads() -> None:
    files = MemoryFiles()
    ours, other = record(3), record(500)
    strange = Record(STORED, other.key, other.held._replace(integrity=99))
    fd = files.open(PATH, write=True)
    files.write(fd, [pack_page(0, STORE, map(pack_record, (strange, ours)))], 0)
    journal = opened(files, PATH, write=True)
    assert read_new(journal) == [ours]
    assert journal.next_seq() == 501


def test_bytes_are_those_of_the_first_version() -> None:
    """So that its stores are read: a page behind the tail that it left there, and all before."""
    files = MemoryFiles()
    pages = [
        pack_page(0, STORE, [pack_record(record(seq, slot=seq % 7)) for seq in range(1, 19)]),
        pack_page(1, STORE, [pack_record(record(60, name="new", slot=3))]),
        pack_page(2, STORE, [pack_record(record(seq, slot=3)) for seq in range(30, 48)]),
    ]
    data = b"".join(pages)
    assert hashlib.sha256(data).hexdigest() == FIRST_VERSION
    fd = files.open(PATH, write=True)
    files.write(fd, [data], 0)
    rows = opened(files, PATH, write=True).read_new()
    index = Index()
    index.rebuild(rows[newest(rows)])
    there = {held.slot.number: (key, held.seq) for key, held in index.items()}
    assert there[3] == (key_of("new"), 60)
    assert {number: seq for number, (_, seq) in there.items()} == {
        **{seq % 7: seq for seq in range(12, 19)},
        3: 60,
    }


FIRST_VERSION = "b90da86245f4eec88b4e97c640f3be480ae05a39805612c212da78617eee838f"


def test_a_rewrite_that_fails_changes_nothing(tmp_path: Path) -> None:
    for operation in range(8):
        files = FaultyFiles()
        journal = journal_of(tmp_path, files)
        there = read_new(journal)
        there += fill(journal, 3)
        files.at = len(files.done) + operation
        try:
            journal.rewrite(map(pack_record, there))
        except OSError as error:
            assert error.strerror == "No space left on device"
        files.armed = False
        there += fill(journal, 30)
        journal.close()
        assert not (tmp_path / "journal.tmp").exists()
        journal = journal_of(tmp_path, write=False)
        assert read_new(journal) == there
        journal.close()


def test_the_store_id_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert peek_store_id(FileIO(), str(path)) is None
    path.write_bytes(bytes(PAGE_BYTES) + pack_page(1, STORE, []))
    assert peek_store_id(FileIO(), str(path)) == STORE
    path.write_bytes(b"x" * 10_000)
    assert peek_store_id(FileIO(), str(path)) is None


def test_the_newest_word_about_a_key_and_a_slot_wins() -> None:
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
    rows = np.frombuffer(b"".join(map(pack_record, records)), ROW)
    index = Index()
    index.rebuild(rows[newest(rows)])
    assert [(key, held.slot.number) for key, held in index.items()] == [
        (key_of("d"), 1),
        (key_of("c"), 2),
        (key_of("e"), 0),
    ]
    assert len(index) == 3 and key_of("d") in index and key_of("a") not in index
    assert index.get(key_of("c")) == records[5].held
    assert index.get(key_of("a")) is index.pop(key_of("b")) is None
    assert list(index.lines()) == [pack_record(records[n]) for n in (4, 5, 6)]


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), min_size=10, max_size=40
    )
)
def test_the_newest_word_as_one_would_read_it_line_by_line(
    said: list[tuple[int, int, bool]],
) -> None:
    records = [
        record(seq, name=name, slot=slot, op=STORED if stores else DELETED)
        for seq, (name, slot, stores) in enumerate(said, 1)
    ]
    there: dict[bytes, Held] = {}
    for op, key, held in records:
        there.pop(key, None)
        if op == STORED:
            for other in [k for k, h in there.items() if h.slot == held.slot]:
                del there[other]
            there[key] = held
    rows = np.frombuffer(b"".join(map(pack_record, records)), ROW)
    index = Index()
    index.rebuild(rows[newest(rows)])
    assert list(index.items()) == list(there.items())
    assert index.oldest(1) == list(there)[:1]
    index.clear()
    assert len(index) == 0
