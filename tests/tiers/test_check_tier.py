"""`check_tier` itself: it passes correct tiers and finds every wrong one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings

from flowkv import Tier
from flowkv.testing import FlakyTier, MemoryTier, check_tier
from flowkv.tiers import Completion, Load, Outcome, Store
from tests.inside import Faults, ManualClock, tier_machine

from . import mutants
from .frames import LAYOUT, key_of, outcomes, stored

SMALL, TIGHT = 1 << 18, 1 << 15


@pytest.fixture
def quick() -> Iterator[None]:
    """Looks for a failure, and does not make it smaller."""
    before = settings.get_current_profile_name()
    settings.register_profile(
        "mutants",
        derandomize=True,
        deadline=None,
        max_examples=2000,  # a wrong tier ends it at once
        phases=[Phase.generate],
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")
    yield
    settings.load_profile(before)


@pytest.fixture
def impatient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_machine, "GRACE_S", 0.3)
    monkeypatch.setattr(tier_machine, "PATIENCE_S", 1.5)


def flip(tier: Tier, number: int) -> None:
    """Spoils a bit of one body."""
    assert isinstance(tier, MemoryTier)
    if tier.frames:
        key = sorted(tier.frames)[number % len(tier.frames)]
        header, body = tier.frames[key]
        damaged = bytearray(body)
        bit = number % (8 * len(body))
        damaged[bit // 8] ^= 1 << bit % 8
        tier.frames[key] = header, bytes(damaged)


class Lasting(MemoryTier):
    """Keeps its frames when it is closed."""

    def close(self) -> None:
        pass


def again(tier: Tier) -> Tier:
    tier.close()
    return tier


class Reader(MemoryTier):
    """A second handle of a `MemoryTier`: sees what it has."""

    writable = False
    shared = True

    def __init__(self, first: Tier) -> None:
        assert isinstance(first, MemoryTier)
        super().__init__(first.capacity_bytes)
        self.frames = first.frames

    def delete(self, keys: object) -> int:
        return 0

    def submit_store(self, items: object, *, deadline_s: float = 60.0) -> int:
        refused = Outcome.FAILED
        return self._answer(
            [Completion(0, 0, i.key, refused, "read-only") for i in items]  # type: ignore[attr-defined]
        )

    def close(self) -> None:
        pass


def test_correct_tiers_pass() -> None:
    check_tier(Lasting, reopen=again, peer=Reader, capacity_bytes=SMALL)


def test_damage_is_no_fault() -> None:
    check_tier(MemoryTier, damage=flip, capacity_bytes=SMALL)


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.__name__)
def test_wrong_tier_is_found(mutant: type[MemoryTier], impatient: None) -> None:
    capacity_bytes = TIGHT if mutant is mutants.Overruns else SMALL
    with pytest.raises((AssertionError, BufferError)):
        check_tier(mutant, capacity_bytes=capacity_bytes)


@pytest.mark.parametrize("mutant", [mutants.Resurrects, mutants.LosesAtClose])
def test_wrong_restart_is_found(mutant: type[MemoryTier], quick: None) -> None:
    with pytest.raises(AssertionError):
        check_tier(mutant, reopen=again, capacity_bytes=SMALL)


def test_wrong_trust_is_found(quick: None) -> None:
    with pytest.raises(AssertionError, match="WRONG BYTES"):
        check_tier(mutants.Unverified, damage=flip, capacity_bytes=SMALL)


def test_wrong_second_handle_is_found(quick: None) -> None:
    with pytest.raises(AssertionError):
        check_tier(Lasting, peer=mutants.Behind, capacity_bytes=SMALL)  # type: ignore[arg-type]


class Early(Lasting):
    """Answers stores with a short deadline early; other handles find their frames for a moment."""

    looks = 3

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.leaving = dict[bytes, int]()

    def submit_store(self, items: Sequence[Store], *, deadline_s: float = 60.0) -> int:
        if deadline_s > 1:
            return super().submit_store(items)
        late = Outcome.FAILED
        return self._answer([Completion(0, 0, one.key, late, "deadline") for one in items])

    def poll(self, timeout_s: float = 0.0) -> list[Completion]:
        answers = super().poll()
        gone = {one.key for one in answers if one.reason == "deadline"} - self.frames.keys()
        self.leaving |= dict.fromkeys(gone, self.looks)
        return answers


class Watching(Reader):
    """Finds what an `Early` is deleting."""

    def __init__(self, first: Tier) -> None:
        assert isinstance(first, Early)
        super().__init__(first)
        self.leaving = first.leaving

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = [key in self.frames or key in self.leaving for key in keys]
        for key in [key for key in keys if key in self.leaving]:
            self.leaving[key] -= 1
            if not self.leaving[key]:
                del self.leaving[key]
        return found


class Lingering(Early):
    """Deletes nothing that it answered early."""

    looks = 1 << 30


class Seen(Early):
    """Finds them itself, too."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.frames or key in self.leaving for key in keys]


def test_other_handles_may_find_for_a_moment_what_failed(briefly: None) -> None:
    check_tier(Early, peer=Watching, capacity_bytes=SMALL)


@pytest.mark.parametrize("owner", [Lingering, Seen])
def test_what_failed_must_not_be_found_longer_or_at_home(
    owner: type[Early], impatient: None
) -> None:
    with pytest.raises(AssertionError, match="not there is said to be there"):
        check_tier(owner, peer=Watching, capacity_bytes=SMALL)


def lying(capacity_bytes: int) -> Tier:
    return FlakyTier(mutants.WrongStripe(capacity_bytes), 3)


def test_a_lossy_tier_must_not_lie_either(quick: None) -> None:
    with pytest.raises(AssertionError, match="WRONG BYTES"):
        check_tier(lying, lossy=True, capacity_bytes=SMALL)


def test_a_link_is_as_slow_as_it_says() -> None:
    clock = ManualClock()
    tier = FlakyTier(MemoryTier(), 3, Faults(bytes_per_s=8192.0), clock)
    stored(tier, range(3))
    loads = [Load(key_of(n), memoryview(bytearray(8192)), LAYOUT) for n in (0, 1, 9, 2)]
    tier.submit_load(loads)
    assert outcomes(tier.poll()) == [("miss", "")], "only loads that hit are slowed down"
    clock.advance(s=0.999)
    assert tier.poll() == []
    clock.advance(s=0.002)
    (first,) = tier.poll()
    assert (first.item, first.seconds) == (0, pytest.approx(1.0, abs=0.01))
    clock.advance(s=5)
    assert [answer.item for answer in tier.poll()] == [1, 3]
    tier.submit_load(loads[:1])
    assert tier.poll() == [], "an idle link saves nothing up"
