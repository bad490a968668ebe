"""Protocols of one fault each: the checker of histories, or who reads the log, must find them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowkv import KV
from flowkv.testing import MemoryTier
from tests.cache.fakes import Deferred, Silent, Wrapped
from tests.cache.histories import PROMPTS, Witness, explain, fill, pages_of
from tests.cache.peer import cache_over, evict
from tests.cache.toy import PAGE, make_kv, simple
from tests.inside import (
    ClosedTails,
    Erased,
    ErasureLog,
    ErasureLogs,
    Lane,
    Listing,
    PageStore,
    PrefixIndex,
    Schedule,
    StoreError,
    TierStack,
    erasure,
    erasure_log,
    new_entry,
)
from tests.tiers import test_erasure_log as of_the_log

Patch = pytest.MonkeyPatch


class World:
    """Caches over one place, and what they witness."""

    def __init__(self, directory: Path, patch: Patch) -> None:
        self.directory, self.patch, self.seen = directory, patch, Witness()
        self.caches: list[KV] = []
        self.frames = MemoryTier(name="pool")

    def cache(self, place: str = "pool", *, private: bool = False) -> KV:
        return self._open(cache_over(place, str(self.directory), private=private))

    def over(self, tier: type[Wrapped] = Wrapped, **changes: Any) -> tuple[KV, Any]:
        """A cache over memory that answers as the test says."""
        named = {"kind": "disk", "shared": True, "erasure_log": self.directory / "log"}
        opened = tier(self.frames, **named | changes)
        return self._open(make_kv(simple(), pages=16, tiers=[opened])), opened

    def _open(self, kv: KV) -> KV:
        self.caches.append(kv)
        return kv

    def shared(self, *, private: bool = False) -> tuple[KV, KV]:
        """Two caches that both have a prompt on their devices."""
        a, b = self.cache(), self.cache(private=private)
        self.seen.ask(a, "a")
        a.flush()
        assert self.seen.ask(b, "a") == 2
        return a, b

    @contextmanager
    def held(self, kv: KV) -> Iterator[None]:
        """Nothing is sent to the tier within it."""
        (lane,) = kv.planner.store.stack.mover.lanes
        lane.pump, pump = (lambda: 0), lane.pump
        try:
            yield
        finally:
            lane.pump = pump

    def apart(self) -> tuple[KV, KV]:
        """Two caches that store nothing by themselves."""
        both = self.cache("host"), self.cache("host")
        for kv in both:
            kv.planner.store.stack.admission.write_back = False
        return both

    def end(self) -> None:
        try:
            wrong = explain(self.seen.history)
            assert not wrong, wrong
        finally:
            for kv in self.caches:
                kv.close()


# ---- stories: what happens, whatever the protocol


def forgotten(world: World) -> None:
    a, b = world.shared()
    world.seen.forget(a, "a")
    world.seen.ask(b, "a")


def forgotten_tenant(world: World) -> None:
    a, b = world.shared()
    world.seen.forget_tenant(a, "")
    world.seen.ask(b, "a")


def invalidated(world: World) -> None:
    a, b = world.shared()
    world.seen.invalidate(a)
    world.seen.ask(b, "a")


def only_others_had_it(world: World) -> None:
    """Nothing of it lies where who forgets could see it."""
    a, b = world.apart()
    world.seen.ask(b, "a")
    world.seen.forget(a, "a")
    world.seen.ask(b, "a")


def only_the_end(world: World) -> None:
    """The first page stays, as another prompt has it."""
    a, b = world.shared()
    with a.open([*PROMPTS["a"][:PAGE], *[9] * PAGE, 0]) as seq:
        for step in a.prefill([seq]):
            fill(step, 77)
    with world.seen.erases([("", "a", 1)]):
        a.forget(PROMPTS["a"])
    world.seen.ask(b, "a")


def what_goes_on(world: World) -> None:
    """The last page is not full, and who forgets the prompt has another one that goes on there."""
    a, b = world.apart()
    for kv, tail in ((a, [7] * PAGE), (b, [8] * PAGE)):
        with kv.open([*PROMPTS["a"], *tail, 0]) as seq:
            for step in kv.prefill([seq]):
                fill(step, tail[0])
    a.forget([*PROMPTS["a"], 8, 8, 8])
    assert b.explain([*PROMPTS["a"], *[8] * PAGE, 0]).known <= 2 * PAGE, "it is still known"


def in_private_memory(world: World) -> None:
    a, b = world.shared(private=True)
    evict(b)
    b.flush()
    world.seen.forget(a, "a")
    b.explain([1])
    assert not list(b.planner.store.stack.tiers[0].scan()), "its bytes are left"
    world.seen.ask(b, "a")


def twice(world: World) -> None:
    a, b = world.shared()
    world.seen.ask(b, "b")
    world.seen.forget(a, "a")
    world.seen.forget(a, "b")
    for name in "ab":
        world.seen.ask(b, name)


def both_forget(world: World) -> None:
    """Each hears of the other, also of what came before his own."""
    a, b = world.shared()
    c = world.cache()
    for name in "ab":
        world.seen.ask(c, name)
        world.seen.ask(b, name)
    c.flush()
    before = erasure._alone

    @contextmanager
    def late(store: PageStore, realm: erasure.Realm) -> Iterator[dict[int, str]]:
        if store is b.planner.store:  # who forgets has looked, and has no lock yet
            world.patch.setattr(erasure, "_alone", before)
            world.seen.forget(a, "a")
        with before(store, realm) as problems:
            yield problems

    world.patch.setattr(erasure, "_alone", late)
    world.seen.forget(b, "b")
    for name in "ab":
        world.seen.ask(b, name)
        world.seen.ask(c, name)


def resumed(world: World) -> None:
    a, b = world.shared()
    seq = b.open([*PROMPTS["a"], 0])
    b.suspend(seq)
    evict(b)
    world.seen.forget(a, "a")
    b.resume(seq)
    world.seen.ask(b, "a")
    seq.close()
    world.seen.ask(b, "a")


def store_that_waits(world: World) -> None:
    """Its bytes were given to the lane before; it is sent after."""
    a, b = world.cache(), world.cache()
    with world.held(b):
        world.seen.ask(b, "a")
        world.seen.forget(a, "a")
    b.planner.store.writes.drain()
    b.flush()
    world.seen.ask(world.cache(), "a")


def store_that_begins(world: World) -> None:
    """Somebody erases after a store looked, and before it is done."""
    a, b = world.cache(), world.cache()
    world.patch.setattr(a.planner.store.stack.erasure_logs[0], "_patience_s", 0.02)
    tier = b.planner.store.stack.tiers[0].inner
    submit = tier.submit_store

    def meanwhile(items: Any, **options: Any) -> int:
        tier.submit_store = submit
        with suppress(StoreError):
            world.seen.forget(a, "a")
        return int(submit(items, **options))

    with world.held(b):
        world.seen.ask(b, "a")
    tier.submit_store = meanwhile
    b.planner.store.writes.drain()
    world.seen.ask(a, "a")


def erased_while_others_store(world: World) -> None:
    """A store comes between the erasing of a tier and the word."""
    a, b = world.shared()
    before = ErasureLog.publish

    def meanwhile(log: ErasureLog, *names: Any, **options: Any) -> None:
        world.patch.setattr(ErasureLog, "publish", before)
        store = b.planner.store
        for block in list(store.index):
            block.tiers = 0
            store.eviction.store_pages([block], 0)
        b.planner.store.writes.drain()
        before(log, *names, **options)

    world.patch.setattr(ErasureLog, "publish", meanwhile)
    world.seen.forget(a, "a")
    world.seen.ask(world.cache(), "a")


def loaded_while_others_erase(world: World) -> None:
    """Others look prompts up while it is erased."""
    a, b = world.shared()
    before = erasure._erase_from

    def meanwhile(*given: Any) -> str:
        world.patch.setattr(erasure, "_erase_from", before)
        world.seen.ask(b, "a")
        return before(*given)

    world.patch.setattr(erasure, "_erase_from", meanwhile)
    world.seen.forget(a, "a")
    world.seen.ask(b, "a")


def erased_while_stored(world: World) -> tuple[KV, Any, list[bytes]]:
    """A cache that knows that pages were erased, its tier, which still stores them, and keys."""
    b, tier = world.over(Deferred)
    world.seen.ask(b, "a")
    b.planner.store.writes.drain()
    keys = [block.key for block in b.planner.store.index]
    with world.seen.erases(pages_of("a")):
        told(ErasureLog(world.directory / "log"), keys)
    world.seen.ask(b, "b")
    return b, tier, keys


def store_that_ends_late(world: World) -> None:
    b, tier, keys = erased_while_stored(world)
    tier.work()
    b.planner.store.writes.drain()
    assert not {*keys} & {*world.frames.frames}, "its bytes are left"
    tier.work()
    world.seen.ask(b, "a")


def load_that_ends_late(world: World) -> None:
    """What is under way has what was there before; nobody who comes later may have it, too."""
    writer, _ = world.over()
    b, tier = world.over(Silent)
    world.seen.ask(writer, "a")
    writer.flush()
    old = b.prefetch(PROMPTS["a"])
    b.planner.store.writes.drain()
    assert tier.loads == 1
    world.seen.forget(writer, "a")
    world.seen.ask(writer, "a")
    writer.flush()
    new = b.prefetch(PROMPTS["a"])
    b.planner.store.writes.drain()
    assert new.left == 2
    assert b.planner.store.stack.mover.lanes[0].schedule.joined == 0, "it follows what was before"
    tier.speak()
    old.cancel()
    new.cancel()


def read_from_a_store(world: World) -> None:
    """A frame that is just being stored is read from memory, unless it was erased since."""
    b, tier, keys = erased_while_stored(world)
    assert not any(map(b.planner.store.stack.mover.on_the_way, keys)), "it can still be read"
    tier.work()


def tails(world: World) -> None:
    """What fills no page, and is known as long as a page in memory has it."""
    a, b = world.cache(), world.cache()
    for _ in range(2):
        with b.open([*PROMPTS["a"], 8, 8, 8, 8]) as seq:
            for step in b.prefill([seq]):
                fill(step, 5)
    assert b.planner.store.tails
    a.forget([*PROMPTS["a"], 8, 8, 8, 8])
    b.explain([1])
    assert not b.planner.store.tails, "a tail is left"


def opened_while_others_erase(world: World) -> None:
    """The log is read before the tier is listed."""
    a = world.cache()
    world.seen.ask(a, "a")
    a.flush()
    enter = Listing.publish_frames

    def meanwhile(listing: Listing, *given: Any) -> None:
        world.patch.setattr(Listing, "publish_frames", enter)
        world.seen.forget(a, "a")
        enter(listing, *given)

    world.patch.setattr(Listing, "publish_frames", meanwhile)
    b = world.cache()
    store = b.planner.store
    assert not len(store.index) or store.stack.erasure_logs.outdated(), "nobody tells it"


def two_places(world: World) -> None:
    """The second of two shared tiers is heard of, too."""
    other = Wrapped(MemoryTier(name="other"), kind="host", erasure_log=world.directory / "other")
    pool = Wrapped(world.frames, kind="disk", erasure_log=world.directory / "log")
    b = world._open(make_kv(simple(), pages=16, tiers=[other, pool]))
    a, _ = world.over()
    world.seen.ask(b, "a")
    world.seen.forget(a, "a")
    world.seen.ask(b, "a")


def short_prompt(world: World) -> None:
    """One that fills no page: others do not know what begins with it."""
    a, b = world.apart()
    world.seen.ask(b, "a")
    with world.seen.erases(pages_of("a")):
        a.forget(PROMPTS["a"][: PAGE // 2])
    world.seen.ask(b, "a")


def continued(world: World) -> None:
    """What only another cache knows to continue it goes, too."""
    a, b = world.apart()
    world.seen.ask(b, "a")
    with world.seen.erases(pages_of("a")):
        a.forget(PROMPTS["a"][:PAGE])
    b.explain([1])
    assert not len(b.planner.store.index), "what continues it is left"
    world.seen.ask(b, "a")


def opened_before(world: World) -> None:
    """It has computed nothing yet, and publishes nothing all the same."""
    a, b = world.cache(), world.cache()
    seq = b.open([*PROMPTS["a"], 0])
    world.seen.forget(a, "a")
    b.explain([1])
    assert not seq.publishable, "it would be known again"
    seq.close()


# ---- the log alone, by its own tests


def told(log: ErasureLog, keys: list[bytes], **names: Any) -> None:
    with log.erasing():
        log.publish(new_entry(keys, **names))


def log_overtaken(world: World) -> None:
    of_the_log.test_who_has_fallen_behind_its_end_takes_all_as_erased(world.directory / "log")


def log_damaged(world: World) -> None:
    of_the_log.check_flipped(world.directory / "log", 9, 0)


def log_entry_damaged(world: World) -> None:
    of_the_log.check_flipped(world.directory / "log", 30, 0)


def log_made_anew(world: World) -> None:
    path, (first, second, *_) = world.directory / "log", of_the_log.KEYS
    a, b = ErasureLog(path), ErasureLog(path)
    told(a, [first])
    assert b.news().has(first)
    path.write_bytes(b"")
    told(ErasureLog(path), [second])
    assert b.changed() and b.news().everything


def log_replaced(world: World) -> None:
    of_the_log.test_a_file_in_its_place_is_noticed(world.directory / "log", of_the_log._removed)


# ---- what is wrong in each mutant, and the story that shows it

changed, news, publish = ErasureLog.changed, ErasureLog.news, ErasureLog.publish
between, drop = erasure_log._between, erasure._drop
Change = Callable[[Patch], None]
MUTANTS: dict[str, tuple[Callable[[World], None], Change]] = {}


def mutant(*stories: Callable[[World], None]) -> Callable[[Change], Change]:
    """A protocol that is changed, and the stories each of which must show it."""

    def add(change: Change) -> Change:
        for story in stories:
            MUTANTS[f"{change.__name__}-{story.__name__}"] = story, change
        return change

    return add


def replaces(owner: Any, name: str, by: Any, *stories: Callable[[World], None], said: str) -> None:
    def change(patch: Patch) -> None:
        patch.setattr(owner, name, by)

    change.__name__ = said
    mutant(*stories)(change)


def news_of(*fields: str) -> Callable[[ErasureLog], Erased]:
    """News without what some fields say."""

    def less(log: ErasureLog) -> Erased:
        return msgspec.structs.replace(news(log), **dict.fromkeys(fields, frozenset()))

    return less


def publishing(*less: str) -> Callable[..., None]:
    def said(log: ErasureLog, entry: Erased) -> None:
        publish(log, msgspec.structs.replace(entry, **dict.fromkeys(less, frozenset())))

    return said


def odd_is_none(*given: Any) -> Erased:
    said = between(*given)
    return Erased() if said.everything else said


# the log
replaces(ErasureLog, "changed", lambda log: False, forgotten, said="never_looks")
replaces(
    ErasureLog,
    "changed",
    lambda log: os.pread(log._fd, 16, 0) != log._head,
    log_replaced,
    said="does_not_notice_another_file",
)
replaces(ErasureLog, "news", news_of("keys"), forgotten, said="hears_no_keys")
replaces(ErasureLog, "news", news_of("below"), what_goes_on, said="hears_nothing_below")
replaces(
    ErasureLog, "news", news_of("realms"), forgotten_tenant, invalidated, said="hears_no_realms"
)
replaces(erasure_log, "_between", odd_is_none, log_overtaken, log_made_anew, said="odd_is_nothing")
damaged = log_damaged, log_entry_damaged, log_replaced
replaces(erasure_log, "ALL", Erased(), *damaged, said="damage_is_nothing")
replaces(
    erasure_log,
    "_between",
    lambda before, there, own: between(before and before | set([*there][:-1]), there, own),
    log_overtaken,
    twice,
    said="reads_the_last_entry_only",
)
replaces(
    erasure_log,
    "_between",
    lambda before, there, own: between(
        before and before | set([lot for lot in there if lot not in before | own][:1]), there, own
    ),
    log_overtaken,
    forgotten,
    said="leaves_the_first_entry_out",
)
replaces(
    erasure_log,
    "_between",
    lambda before, there, own: Erased() if own else between(before, there, own),
    both_forget,
    said="his_own_hide_those_of_others",
)
replaces(ErasureLog, "publish", publishing("keys"), forgotten, said="names_no_keys")
replaces(ErasureLog, "publish", publishing("below"), what_goes_on, said="names_nothing_below")
replaces(ErasureLog, "publish", publishing("realms"), invalidated, said="names_no_realms")
replaces(ErasureLog, "publish", lambda *_, **__: None, forgotten, said="tells_nobody")


@mutant(both_forget)
def takes_what_it_did_not_hear_as_heard(patch: Patch) -> None:
    def deaf(log: ErasureLog, *names: Any, **how: Any) -> None:
        publish(log, *names, **how)
        news(log)

    patch.setattr(ErasureLog, "publish", deaf)


# locks
unlocked = erased_while_others_store, store_that_begins
replaces(
    ErasureLog, "storing", lambda _: nullcontext(True), *unlocked, said="stores_without_a_lock"
)
replaces(ErasureLog, "_take", lambda *_: None, store_that_begins, said="erases_without_a_lock")


@mutant(store_that_waits)
def stores_without_looking(patch: Patch) -> None:
    @contextmanager
    def blind(logs: ErasureLogs, log: ErasureLog) -> Iterator[bool]:
        with log.storing() as free:
            yield free

    patch.setattr(ErasureLogs, "storing", blind)


unbarred = store_that_waits, erased_while_others_store
replaces(Lane, "_bar", lambda *_: None, *unbarred, said="looks_and_stores_all_the_same")


@mutant(store_that_begins)
def lets_go_before_it_stores(patch: Patch) -> None:
    @contextmanager
    def early(logs: ErasureLogs, log: ErasureLog) -> Iterator[bool]:
        with log.storing() as free:
            logs.behind |= free and log.changed()
        yield free and not logs.behind

    patch.setattr(ErasureLogs, "storing", early)


# who erases
@mutant(loaded_while_others_erase)
def tells_before_it_erases(patch: Patch) -> None:
    erase = erasure._erase

    def early(store: PageStore, doomed: Any, meant: Any, names: Any, problems: Any) -> int:
        for log in store.stack.erasure_logs.values():
            publish(log, new_entry(*names))
        patch.setattr(ErasureLog, "publish", lambda *_, **__: None)
        return erase(store, doomed, meant, names, problems)

    patch.setattr(erasure, "_erase", early)


@mutant(only_others_had_it)
def tells_only_of_what_it_had(patch: Patch) -> None:
    erase = erasure._erase

    def known(store: PageStore, doomed: Any, meant: Any, names: Any, problems: Any) -> int:
        return erase(store, doomed, meant, names if doomed else erasure._Names(), problems)

    patch.setattr(erasure, "_erase", known)


def names(change: Callable[[Any], Any], *stories: Callable[[World], None], said: str) -> None:
    before = erasure._names
    replaces(erasure, "_names", lambda *given: change(before(*given)), *stories, said=said)


names(
    lambda said: said._replace(keys=list(said.keys)[1:]),
    forgotten,
    said="leaves_the_first_page_out",
)
names(lambda said: said._replace(below=()), what_goes_on, said="forgets_what_goes_on")
names(lambda said: said._replace(realms=()), short_prompt, said="names_no_short_prompts")


# who hears
replaces(KV, "_agreed", KV._bound, forgotten, invalidated, resumed, said="opens_without_looking")
replaces(
    erasure, "_drop", lambda store, number, erased: 0, forgotten, said="hears_and_drops_nothing"
)
replaces(PrefixIndex, "below", lambda index, meant: [], continued, said="drops_nothing_below")


@mutant(forgotten)
def drops_no_device_pages(patch: Patch) -> None:
    def less(store: PageStore, number: int, erased: Erased) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PageStore, "forget", lambda store, *blocks: None)
            return drop(store, number, erased)

    patch.setattr(erasure, "_drop", less)


@mutant(in_private_memory)
def leaves_private_memory(patch: Patch) -> None:
    patch.setattr(TierStack, "_wipe", lambda stack, number, keys: None)
    patch.setattr(TierStack, "delete", TierStack.unlist_all)


@mutant(store_that_waits)
def lets_waiting_stores_go_out(patch: Patch) -> None:
    patch.setattr(Lane, "retract", lambda lane, keys, reason="": None)
    patch.setattr(TierStack, "_wipe", lambda stack, number, keys: None)


replaces(TierStack, "_wipe", lambda *_: None, store_that_ends_late, said="keeps_what_ends_late")


@mutant(load_that_ends_late)
def follows_old_loads(patch: Patch) -> None:
    retract = Lane.retract

    def less(lane: Lane, keys: Any, reason: str = "cancelled") -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Schedule, "stand_alone", lambda schedule, wish: None)
            retract(lane, keys, reason)

    patch.setattr(Lane, "retract", less)


replaces(ClosedTails, "drop", lambda kept, tails=None: None, tails, said="keeps_tails")
whole = forgotten_tenant, invalidated
replaces(Erased, "covers", lambda *_: False, *whole, said="covers_nobody")
replaces(
    Erased, "has", lambda erased, key: key[:4] in erased.keys, forgotten, said="compares_too_little"
)
replaces(erasure, "_hit", lambda *_: False, opened_before, said="lets_open_sequences_publish")


@mutant(two_places)
def hears_of_the_first_place_only(patch: Patch) -> None:
    def first(logs: ErasureLogs) -> bool:
        return next(iter(logs.values())).changed()

    patch.setattr(ErasureLogs, "outdated", first)


@mutant(opened_while_others_erase)
def lists_before_it_reads_the_log(patch: Patch) -> None:
    add = TierStack.add

    def late(stack: TierStack, *given: Any, **how: Any) -> None:
        add(stack, *given, **how)
        for log in stack.erasure_logs.values():
            news(log)

    patch.setattr(TierStack, "add", late)


@mutant(read_from_a_store)
def reads_from_old_stores(patch: Patch) -> None:
    def kept(mover: Any, keys: Any) -> None:
        for lane in mover.lanes:
            lane.retract(keys)

    patch.setattr("flowkv.cache.mover.Mover.retract", kept)


STORIES = {story for story, _ in MUTANTS.values() if not story.__name__.startswith("log_")}
STORIES |= {only_the_end}


@pytest.mark.parametrize("story", sorted(STORIES, key=str), ids=lambda story: story.__name__)
def test_the_protocol_explains_every_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Callable[[World], None]
) -> None:
    world = World(tmp_path, monkeypatch)
    try:
        story(world)
    finally:
        world.end()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    story, change = MUTANTS[name]
    world = World(tmp_path, monkeypatch)
    change(monkeypatch)
    with pytest.raises(AssertionError):
        try:
            story(world)
        finally:
            monkeypatch.undo()
            world.end()


def test_there_are_enough() -> None:
    assert len({name.partition("-")[0] for name in MUTANTS}) >= 30
