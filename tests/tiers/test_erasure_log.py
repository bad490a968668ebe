"""The log of what was erased: who looks finds it, and whatever is odd is taken as everything."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.inside import (
    MOST_KEYS,
    Erased,
    ErasureLog,
    ErasureLogs,
    StoreError,
    erasure_log,
    new_entry,
    realm_name,
)

KEYS = [bytes([n]) * 32 for n in range(1, 8)]
ALICE, BOB, MODEL, OTHER = (bytes([n]) * 32 for n in range(20, 24))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "erased"


def tell(log: ErasureLog, *keys: bytes, **names: object) -> None:
    with log.erasing():
        log.publish(new_entry(keys, **names))  # type: ignore[arg-type]


def heard(log: ErasureLog) -> Erased:
    assert log.changed()
    news = log.news()
    assert not log.changed()
    return news


@contextmanager
def process(work: Callable[[], object]) -> Iterator[int]:
    """A forked process that works until it is killed."""
    ready, done = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            kept = work()
            os.write(done, b"1")
            time.sleep(60)
            del kept
        finally:
            os._exit(0)
    try:
        assert os.read(ready, 1)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(done)


# ---- names


def test_what_is_erased_is_named_by_keys_and_by_realms() -> None:
    named = Erased(keys=frozenset([KEYS[0][:8]]), below=frozenset([KEYS[1][:8]]))
    assert named.has(KEYS[0]) and named.ends(KEYS[0])
    assert not named.has(KEYS[1]) and named.ends(KEYS[1])
    assert not named.has(KEYS[2]) and not named.ends(KEYS[2]) and not named.covers(ALICE, MODEL)
    for realm, others in (
        ((ALICE, None), (BOB, MODEL)),
        ((None, MODEL), (ALICE, OTHER)),
        ((ALICE, MODEL), (ALICE, OTHER)),
    ):
        erased = Erased(realms=frozenset([realm_name(*realm)]))
        assert erased.covers(ALICE, MODEL) and not erased.covers(*others) and erased
    assert not Erased() and Erased(everything=True).covers(BOB, OTHER)


# ---- a file that is there, and cannot be opened


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_what_is_erased_while_no_descriptor_is_left(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The cache took the log as none: it served erased pages, and stored while others erased."""
    eraser = ErasureLog(path)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(erasure_log, "open_descriptor", refuse)
        log = ErasureLog(path)
        tell(eraser, KEYS[0])
        assert log.changed() and log.news().everything and log.changed()
        logs = ErasureLogs({0: log})
        with logs.storing(log) as free:
            assert not free
    assert heard(log).everything
    tell(eraser, KEYS[1])
    assert heard(log).keys == {KEYS[1][:8]}


def test_a_sound_log_stays_while_no_descriptor_is_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, eraser = ErasureLog(path), ErasureLog(path)
    reader.news()
    tell(eraser, KEYS[0])
    eraser.close()

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(erasure_log, "open_descriptor", refuse)
        with pytest.raises(StoreError), eraser.erasing():
            pass
    tell(eraser, KEYS[1])
    assert heard(reader).keys == {KEYS[0][:8], KEYS[1][:8]}


def test_a_file_that_is_gone_once_it_is_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems: the error reached the caller of `attach` or `open`."""
    eraser, own, calls = ErasureLog(path), os.fstat, itertools.count()

    def fstat(fd: int) -> os.stat_result:
        if next(calls):  # the first one is that of the opening
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return own(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        log = ErasureLog(path)
    tell(eraser, KEYS[0])
    assert next(calls) > 1 and heard(log).everything


# ---- what others hear


def test_others_hear_it_once_and_nobody_hears_himself(path: Path) -> None:
    a, b = ErasureLog(path), ErasureLog(path)
    assert not a.changed() and not b.changed()
    tell(a, *KEYS[:6], below=[KEYS[6]], realms=[realm_name(ALICE, None)], proven=False)
    news = heard(b)
    assert news.keys == {key[:8] for key in KEYS[:6]} and news.below == {KEYS[6][:8]}
    assert news.covers(ALICE, MODEL) and not news.covers(BOB, MODEL) and not news.proven
    assert not heard(a)
    tell(b, KEYS[0])
    tell(a, KEYS[1])
    assert heard(a).keys == {KEYS[0][:8]} and heard(b).keys == {KEYS[1][:8]}


def test_who_opens_it_later_has_nothing_to_hear(path: Path) -> None:
    tell(ErasureLog(path), KEYS[0])
    late = ErasureLog(path)
    assert not late.changed() and not late.news()


@pytest.mark.parametrize("count", [1, 5, MOST_KEYS])
def test_the_file_holds_what_it_says(path: Path, count: int) -> None:
    a, b = ErasureLog(path), ErasureLog(path)
    keys = [number.to_bytes(32, "big")[::-1] for number in range(count)]
    tell(a, *keys)
    tell(a, *keys)
    assert heard(b).keys == {key[:8] for key in keys}


def test_who_has_fallen_behind_its_end_takes_all_as_erased(path: Path) -> None:
    a, b, c = (ErasureLog(path) for _ in range(3))
    for number in range(450):
        tell(a, number.to_bytes(32, "little"))
    assert len(heard(b).keys) == 450
    for number in range(100):
        tell(a, number.to_bytes(32, "little"))
    assert len(heard(b).keys) == 100 and heard(c).everything


def test_what_is_read_while_it_is_written_hides_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = ErasureLog(path), ErasureLog(path)
    known, before = set[bytes](), os.pwrite

    def watched(fd: int, data: bytes, at: int) -> int:
        done = before(fd, data, at)
        if b.changed():
            news = b.news()
            known.update(key for key in KEYS if news.everything or news.has(key))
        return done

    monkeypatch.setattr(os, "pwrite", watched)
    tell(a, *KEYS)
    assert known == set(KEYS)


def test_too_much_at_a_time_is_refused(path: Path) -> None:
    a = ErasureLog(path)
    with pytest.raises(StoreError, match="Erase whole realms instead"):
        tell(a, realms=[number.to_bytes(16, "little") for number in range(1000)])


# ---- damage


@given(at=st.integers(0, 160), bit=st.integers(0, 7))
def test_a_flipped_bit_hides_nothing(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    check_flipped(tmp_path_factory.mktemp("log") / "erased", at, bit)


def check_flipped(path: Path, at: int, bit: int) -> None:
    a, b = ErasureLog(path), ErasureLog(path)
    tell(a, *KEYS)
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    news = heard(b)
    assert news.everything or news.keys == {key[:8] for key in KEYS}
    assert news.everything or at >= 130, "behind the last entry"
    tell(a, KEYS[3])
    assert heard(b).has(KEYS[3])  # and it goes on
    tell(b, KEYS[4])
    erased = heard(a)
    assert erased.everything or erased.has(KEYS[4])


@given(content=st.binary(max_size=256), size=st.sampled_from([0, 1, 64, 16384, 1 << 20]))
def test_whatever_lies_there_is_survived(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, size: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "erased"
    a, b = ErasureLog(path), ErasureLog(path)
    path.write_bytes(content)
    os.truncate(path, size)
    assert heard(b).everything
    tell(a, KEYS[0])
    news = heard(b)
    assert news.everything or news.has(KEYS[0])
    assert path.stat().st_size >= 16384
    assert not ErasureLog(path).changed()


@pytest.mark.parametrize("size", [0, 63, 64, 100, 16383])
def test_a_file_cut_short_kills_nobody(path: Path, size: int) -> None:
    a, b = ErasureLog(path), ErasureLog(path)
    tell(a, KEYS[0])
    os.truncate(path, size)
    assert b.changed() and (b.news().everything or size >= 100)
    tell(a, KEYS[1])
    news = heard(b)
    assert news.everything or news.has(KEYS[1])


def _removed(path: Path) -> None:
    path.unlink()


def _replaced(path: Path) -> None:
    path.rename(path.with_name("away"))
    ErasureLog(path).close()


def _linked(path: Path) -> None:
    path.rename(path.with_name("away"))
    path.symlink_to(path.with_name("away"))


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _opened_to_all(path: Path) -> None:
    path.unlink()
    path.touch(0o600)
    path.chmod(0o666)


@pytest.mark.parametrize("harm", [_removed, _replaced, _linked, _piped, _opened_to_all])
def test_a_file_in_its_place_is_noticed(path: Path, harm: Callable[[Path], None]) -> None:
    """It is looked after every tenth of a second; who erases looks at once, and puts it right."""
    a, b = ErasureLog(path), ErasureLog(path)
    harm(path)
    tell(a, KEYS[0])
    status = path.stat(follow_symlinks=False)
    assert stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
    time.sleep(0.11)
    with b.storing():  # a store that notices it does not hide it from the next look-up
        assert b.changed()
    assert heard(b).everything and heard(a).everything
    tell(b, KEYS[1])
    assert heard(a).has(KEYS[1])


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_log_that_stops_all_stores_says_so_once(path: Path, mode: int) -> None:
    ErasureLog(path).close()
    path.chmod(mode)
    with pytest.warns(UserWarning, match=rf"has mode {mode:o}: .*Run chmod 600") as caught:
        a = ErasureLog(path)
        assert a.changed() and a.news().everything and a.changed()
    assert len(caught) == 1
    path.chmod(0o600)
    assert a.news().everything and not a.changed()


def test_where_it_cannot_be_made_it_is_found_once_it_can(tmp_path: Path) -> None:
    path = tmp_path / "none" / "erased"
    a = ErasureLog(path)
    assert not a.changed()
    with a.storing() as free:
        assert free
    with pytest.raises(StoreError, match="other caches would not learn of the erasure"):
        tell(a, KEYS[0])
    path.parent.mkdir()
    b = ErasureLog(path)
    assert a.changed() and a.news().everything
    tell(b, KEYS[0])
    assert heard(a).has(KEYS[0])


# ---- locks


def test_who_stores_and_who_erases_keep_each_other_out(path: Path) -> None:
    a, b = ErasureLog(path, patience_s=0.02), ErasureLog(path)
    with b.storing() as free:
        assert free
        with ErasureLog(path).storing() as too:
            assert too
        with pytest.raises(StoreError, match="does not go on"):
            tell(a, KEYS[0])
        with b.storing() as still:
            assert still
    with a.erasing():
        for other in (a, b):
            with other.storing() as free:
                assert not free
        with pytest.raises(StoreError, match="Continue or end that process"):
            tell(ErasureLog(path, patience_s=0.02), KEYS[1])
    with b.storing() as free:
        assert free
    tell(a, KEYS[0])
    assert heard(b).has(KEYS[0])


@pytest.mark.parametrize("erases", [False, True])
def test_locks_of_the_dead_are_free_and_those_of_the_stopped_are_not(
    path: Path, erases: bool
) -> None:
    log = ErasureLog(path, patience_s=0.05)

    def work() -> object:
        mine, held = ErasureLog(path), ExitStack()
        held.enter_context(mine.erasing() if erases else mine.storing())
        return held

    with process(work) as pid:
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(StoreError, match="does not go on"):
            tell(log, KEYS[0])
        with log.storing() as free:
            assert free is not erases
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        tell(log, KEYS[0])
        with log.storing() as free:
            assert free


def test_a_child_holds_no_lock_of_its_parent(path: Path) -> None:
    log, other = ErasureLog(path), ErasureLog(path, patience_s=0.05)
    with log.storing() as free, process(lambda: None):
        assert free
        log.close()  # as if the parent were gone
        tell(other, KEYS[0])


def test_who_was_killed_while_he_noted_something_hides_nothing(path: Path) -> None:
    """Half an entry is damage: everything counts as erased, and the next entry is read again."""
    reader = ErasureLog(path)
    tell(ErasureLog(path), KEYS[0])
    assert heard(reader).keys == {KEYS[0][:8]}

    def work() -> object:
        mine, held = ErasureLog(path), ExitStack()
        held.enter_context(mine.erasing())
        before = os.pwrite
        os.pwrite = lambda fd, data, at: before(fd, data[:-9], at)
        mine.publish(new_entry(KEYS))
        return held

    with process(work):
        pass
    assert heard(reader).everything
    tell(ErasureLog(path), KEYS[0])
    assert heard(reader).keys == {KEYS[0][:8]}


def test_where_nothing_can_be_locked_nothing_is_stored_and_nothing_raises(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems: nobody could be kept from erasing."""

    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOLCK, "no locks")

    log = ErasureLog(path, patience_s=0.01)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with log.storing() as free:
        assert not free
    with pytest.raises(StoreError, match="locked"), log.erasing():
        pass
    assert not log.changed()
    log.close()
