"""One tier of a simulated stack: what was asked of it, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowkv.core.clock import Clock
from flowkv.testing.tier_model import Frame, Model, Wish
from flowkv.tiers.base import Completion, Load, Outcome, Store, Tier

DAMAGED = frozenset({"digest", "key", "foreign", "truncated", "version"})
BEFORE, AFTER = 0xA5, 0x5A


class Place:
    """A tier, the model of what it may hold, and its jobs in flight.

    Args:
        tier: The tier.
        lossy: It may lose frames whenever it likes.
        clock: The one that the tier looks at.
        note: Called with a line for every answer.

    Attributes:
        excused: Reasons for which stores and loads may fail now.
        harmed: Whether bits were flipped, so that frames may be refused as damaged.
        answered: Items answered so far.
        undone: Keys of stores that failed half done: a killed tier may find their frames.
    """

    def __init__(
        self, tier: Tier, *, lossy: bool, clock: Clock, note: Callable[[str], None]
    ) -> None:
        self.tier, self.clock, self.note = tier, clock, note
        self.model = Model(lossy)
        self.excused: frozenset[str] = frozenset()
        self.harmed = False
        self.answered = 0
        self.undone: set[bytes] = set()
        self._jobs: dict[int, dict[int, tuple[Wish, Callable[[Completion], None] | None]]] = {}
        self._done: list[tuple[object, bytes]] = []  # bytearrays compare far faster than views

    @property
    def flying(self) -> int:
        """Items that wait for an answer."""
        return len(self.model.flying)

    @property
    def jobs(self) -> list[int]:
        """Jobs that wait for answers."""
        return list(self._jobs)

    def store(
        self,
        frames: Sequence[tuple[bytes, Frame]],
        deadline_s: float,
        done: Callable[[Completion], None] | None = None,
    ) -> None:
        """Starts a job of stores."""
        now_s = self.clock.now_ns() / 1e9
        wishes = []
        for key, frame in frames:
            item = Store(key, frame.info, memoryview(bytearray(frame.body)))
            wishes.append(Wish(item, frame, now_s + deadline_s))
        need = sum(self.tier.frame_bytes(wish.n_bytes) for wish in wishes)
        flying = [wish for wish in self.model.flying if wish.frame]
        before = sum(self.tier.frame_bytes(wish.n_bytes) for wish in flying)
        for wish in flying:
            wish.room_bytes += need
        for wish in wishes:
            wish.room_bytes = self.tier.used_bytes() + before + need
            self.model.submit(wish)
        items = [wish.item for wish in wishes if isinstance(wish.item, Store)]
        job = self.tier.submit_store(items, deadline_s=deadline_s)
        self._jobs[job] = {index: (wish, done) for index, wish in enumerate(wishes)}

    def load(
        self,
        items: Sequence[Load],
        deadline_s: float,
        done: Callable[[Completion], None] | None = None,
    ) -> None:
        """Starts a job of loads; their targets are full of one byte before."""
        due_s = self.clock.now_ns() / 1e9 + deadline_s
        wishes = [Wish(item, None, due_s) for item in items]
        for wish in wishes:
            self.model.submit(wish)
        job = self.tier.submit_load(items, deadline_s=deadline_s)
        self._jobs[job] = {index: (wish, done) for index, wish in enumerate(wishes)}

    def cancel(self, job: int) -> None:
        """Gives up a job."""
        for wish, _ in self._jobs[job].values():
            wish.cancelled = True
        self.tier.cancel(job)

    def delete(self, keys: Sequence[bytes], *, erase: bool = False) -> None:
        """Forgets frames."""
        surely = sum(None not in self.model.may[key] for key in keys)
        gone = self.tier.erase(keys) if erase else self.tier.delete(keys)
        assert surely <= gone or self.model.lossy, "less was deleted than was there"
        for key in keys:
            self.model.delete(key)

    def poll(self) -> None:
        """Takes what is ready; everything overdue is."""
        now_s = self.clock.now_ns() / 1e9
        for answer in self.tier.poll(0.0):
            self._check(answer)
        late = [wish for wish in self.model.flying if wish.due_s < now_s - 1e-6]
        assert not late, f"{len(late)} items of {self.tier.name} missed their deadline"

    def abandon(self) -> None:
        """The process is gone: nobody will hear how what is in flight ended."""
        for wish in list(self.model.flying):
            self.model.flying.remove(wish)
            if wish.frame is not None:
                self.model.may[wish.item.key].add(wish.frame)
            self._retire(wish)
        self._jobs.clear()

    def look(self, keys: Sequence[bytes]) -> None:
        """Checks what always holds."""
        assert 0 <= self.tier.used_bytes() <= self.tier.capacity_bytes, "over its capacity"
        for key, there in zip(keys, self.tier.contains(keys), strict=True):
            self.model.present(key, there)
        for memory, kept in self._done:
            assert memory == kept, "memory touched after its answer"
        del self._done[:-64]

    def _check(self, answer: Completion) -> None:
        wishes = self._jobs.get(answer.job, {})
        assert answer.item in wishes, f"{answer.job}.{answer.item} answered twice, or never asked"
        wish, done = wishes.pop(answer.item)
        if not wishes:
            del self._jobs[answer.job]
        self.answered += 1
        self.note(f"{self.tier.name} {answer.key.hex()[:6]} {answer.outcome.value} {answer.reason}")
        assert answer.key == wish.item.key, "the answer names another key"
        if wish.frame is None:
            self._loaded(wish, answer)
        elif answer.outcome is Outcome.STORED:
            self.model.stored(wish)
        else:
            assert answer.outcome is Outcome.FAILED and answer.reason, "a failure says why"
            assert self._may_fail(wish, answer.reason), f"store failed: {answer.reason}"
            self.model.failed(wish)
            self.undone.add(wish.item.key)
        self._retire(wish)
        if done is not None:
            done(answer)

    def _loaded(self, wish: Wish, answer: Completion) -> None:
        item = wish.item
        assert isinstance(item, Load)
        refused = answer.outcome is Outcome.MISS and answer.reason in DAMAGED
        if answer.outcome is Outcome.FAILED and not self.model.lossy:
            assert self._may_fail(wish, answer.reason), f"load failed: {answer.reason}"
            self.model.failed(wish)
        elif refused and not self.model.lossy:
            doubtful = self.harmed and None in wish.seen
            assert doubtful, f"{answer.key.hex()[:6]} was refused as damaged: {answer.reason}"
            self.model.failed(wish)
        else:
            self.model.loaded(wish, answer)
        moved = answer.n_bytes if answer.outcome is Outcome.HIT else item.target.nbytes
        rest = item.target[moved:]
        assert rest == bytes([BEFORE]) * len(rest), "bytes written past what was wished for"

    def _may_fail(self, wish: Wish, reason: str) -> bool:
        if reason in self.excused or self.model.lossy:
            return True
        return {
            "full": wish.room_bytes > self.tier.capacity_bytes,
            "busy": self.flying > 1,
            "deadline": self.clock.now_ns() / 1e9 >= wish.due_s - 1e-6,
            "cancelled": wish.cancelled,
        }.get(reason, False)

    def _retire(self, wish: Wish) -> None:
        item = wish.item
        memory = item.target if isinstance(item, Load) else item.body
        memory[:] = bytes([AFTER]) * memory.nbytes  # its owner uses it again, at once
        self._done.append((memory.obj, bytes(memory)))
