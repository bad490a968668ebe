"""What a tier may hold, seen from outside: the model that `check_tier` compares it with.

With several jobs in flight nobody outside knows which came first. So the model keeps, per key, all
frames that may be there now (`None` stands for nothing there), and every wish collects what may
have been there while it was under way. An answer must agree with one of them; an answer to a wish
that nothing disturbed tells which one it is.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from flowkv.tiers.base import Completion, FrameInfo, Load, Outcome, Store


class Frame(NamedTuple):
    """A description and a body."""

    info: FrameInfo
    body: bytes

    def part(self, wish: Load) -> bytes | None:
        """The stripes wished for; None if the frame has not got them."""
        stripes = len(self.body) // self.info.stripe_bytes
        end = wish.first + wish.stripes if wish.stripes else stripes
        if not 0 <= wish.first < end <= stripes:
            return None
        return self.body[wish.first * self.info.stripe_bytes : end * self.info.stripe_bytes]

    def problems(self, wish: Load) -> set[tuple[Outcome, str]]:
        """Why a wish for this frame cannot be granted; any of the reasons may be given."""
        found = set()
        part = self.part(wish)
        if self.info.layout != wish.layout:
            found.add((Outcome.MISS, "layout"))
        if self.info.fidelity > wish.fidelity:
            found.add((Outcome.MISS, "fidelity"))
        if part is None:
            found.add((Outcome.MISS, "stripes"))
        if wish.target.readonly or (part is not None and wish.target.nbytes < len(part)):
            found.add((Outcome.FAILED, "target"))
        return found


class Wish:
    """One item in flight.

    Args:
        item: What was asked of the tier.
        frame: What a store should make of the key.
        due_s: When it must be answered, in `time.monotonic` seconds.
        step: Number of the call that submitted it.

    Attributes:
        seen: What may have been there since it was submitted.
        alone: Whether no store or deletion of the key overlapped with it.
        deleted: Whether the key was deleted meanwhile.
        brought: Whether its frame may be there only because of it.
        room_bytes: Most bytes that the tier may need, counting everything in flight.
        cancelled: Whether it was to be cancelled.
        n_bytes: Bytes of its memory.
    """

    def __init__(
        self, item: Load | Store, frame: Frame | None, due_s: float, step: int = 0
    ) -> None:
        self.item, self.frame, self.due_s, self.step = item, frame, due_s, step
        self.seen: set[Frame | None] = set()
        self.alone, self.deleted, self.brought, self.cancelled = True, False, False, False
        self.room_bytes = 0
        self.n_bytes = (item.target if isinstance(item, Load) else item.body).nbytes


class Model:
    """All keys, and all wishes in flight.

    Args:
        lossy: Frames may vanish at any time, and a store that failed may be there all the same.

    Attributes:
        may: What may be there now, by key.
        flying: Wishes in flight.
        doubtful: Keys whose frame may be damaged: said to be there, and refused when it is read.
        promised: Keys whose frame was written, and answered `STORED`, since the last `doubt`.
    """

    def __init__(self, lossy: bool) -> None:
        self.lossy = lossy
        self.doubtful: set[bytes] = set()
        self.promised: set[bytes] = set()
        self.may: defaultdict[bytes, set[Frame | None]] = defaultdict(lambda: {None})
        self.flying: list[Wish] = []
        self._ghosts: defaultdict[bytes, set[Frame]] = defaultdict(set)

    def stores(self, key: bytes) -> list[Wish]:
        """Stores of a key that are in flight."""
        return [wish for wish in self.flying if wish.frame and wish.item.key == key]

    def submit(self, wish: Wish) -> None:
        """A wish was given to the tier."""
        key, may = wish.item.key, self.may[wish.item.key]
        others = [other for other in self.flying if other.item.key == key]
        if wish.frame is not None:
            for other in others:
                other.alone = False
            wish.alone = may == {None} and not others
            if None in may:
                self._add(wish)
        else:
            wish.alone = not any(other.frame for other in others)
        wish.seen = set(may)
        self.flying.append(wish)

    def delete(self, key: bytes) -> None:
        """A key was deleted; stores in flight may bring it back."""
        self.may[key] = {None, *self._ghosts[key]}
        self.doubtful.discard(key)
        self.promised.discard(key)
        for wish in self.flying:
            if wish.item.key == key:
                wish.alone, wish.deleted = False, True
                wish.seen.add(None)
        for wish in self.stores(key):
            self._add(wish)

    def doubt(self, *, but_promised: bool = False) -> None:
        """Every frame that is there now may be gone, or damaged.

        Args:
            but_promised: Except those that were promised.
        """
        kept = self.promised if but_promised else set()
        for key, states in self.may.items():
            if key not in kept:
                self.doubtful.update([key] if states != {None} else [])
                states.add(None)
        for wish in self.flying:
            if wish.item.key not in kept:
                wish.seen.add(None)
                self.doubtful.add(wish.item.key)
        self.promised = set(kept)

    def stored(self, wish: Wish) -> None:
        """A store was answered `STORED`; one of an impossible frame says that another is there."""
        self.flying.remove(wish)
        if wish.alone and wish.frame:
            self.promised.add(wish.item.key)
        doubtful = self.lossy or wish.item.key in self.doubtful
        if wish.frame and not wish.deleted and not doubtful:
            self.may[wish.item.key].discard(None)
            assert self.may[wish.item.key]

    def failed(self, wish: Wish) -> None:
        """A store was answered `FAILED`: unless the tier is lossy, its frame is not there."""
        self.flying.remove(wish)
        if wish.frame is None:
            return
        if self.lossy:
            self._ghosts[wish.item.key].add(wish.frame)
        elif wish.brought:
            heirs = [w for w in self.stores(wish.item.key) if w.frame == wish.frame]
            if heirs:
                heirs[0].brought = True
            else:
                self.may[wish.item.key].discard(wish.frame)

    def loaded(self, wish: Wish, answer: Completion) -> None:
        """A load was answered; raises AssertionError if it cannot have been."""
        self.flying.remove(wish)
        load = wish.item
        assert isinstance(load, Load)
        agree = {state for state in wish.seen if agrees(state, load, answer)}
        if answer.outcome is Outcome.HIT:
            assert agree, f"WRONG BYTES, or a hit for what was not stored: {_short(answer)}"
        elif self.lossy:
            assert answer.outcome in (Outcome.MISS, Outcome.FAILED)
            assert answer.outcome is Outcome.MISS or answer.reason, "a failure says why"
            return
        else:
            excused = answer.outcome is Outcome.FAILED and (
                answer.reason == "deadline" or (answer.reason == "cancelled" and wish.cancelled)
            )
            assert agree or excused, f"{_short(answer)} does not fit what is there"
            if excused:
                return
        if wish.alone:
            doubtful = self.lossy or load.key in self.doubtful
            self.may[load.key] &= agree | ({None} if doubtful else set())

    def present(self, key: bytes, there: bool) -> None:
        """The tier said whether a key is there; raises AssertionError if it cannot be so."""
        may = self.may[key]
        if there:
            assert may != {None}, "a key that is not there is said to be there"
        else:
            assert None in may or self.lossy, "a key that is there is said not to be there"
        if not there and not self.stores(key):
            self.doubtful.discard(key)
        if not self.stores(key) and not self.lossy and key not in self.doubtful:
            self.may[key] = {state for state in may if (state is not None) == there}

    def _add(self, wish: Wish) -> None:
        key, frame = wish.item.key, wish.frame
        assert frame is not None
        wish.brought = wish.brought or frame not in self.may[key]
        self.may[key].add(frame)
        for other in self.flying:
            if other.item.key == key:
                other.seen.add(frame)


def agrees(state: Frame | None, wish: Load, answer: Completion) -> bool:
    """Whether a load may be answered so while this is what is there."""
    said = answer.outcome, answer.reason
    if state is None:
        return said == (Outcome.MISS, "") or (
            wish.target.readonly and said == (Outcome.FAILED, "target")
        )
    problems = state.problems(wish)
    if problems or answer.outcome is not Outcome.HIT:
        return said in problems
    part = state.part(wish)
    assert part is not None
    return (
        answer.info == state.info
        and answer.n_bytes == len(part)
        and wish.target[: len(part)] == part
    )


def _short(answer: Completion) -> str:
    key = answer.key.hex()[:8]
    return f"{answer.outcome.name} {answer.reason!r} of {answer.n_bytes} bytes for {key}"
