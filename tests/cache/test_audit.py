"""Restored pages computed once more: what digests cannot see is found, forgotten and told."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from typing import Any

import pytest
import torch

from flowkv import KV, Geometry, Step
from flowkv.testing import MemoryTier
from tests.cache.audit import audit
from tests.cache.fakes import Wrapped
from tests.cache.toy import (
    PAGE,
    WINDOW,
    check_content,
    geometry,
    make_kv,
    prefill,
    published,
    simple,
    write,
)
from tests.inside import (
    Audited,
    ConfigError,
    Event,
    Quarantined,
    Samples,
    Verdict,
    Warned,
    bind,
    due,
    policy_pages,
)
from tests.inside import layout_CODECS as CODECS

TEXT = list(range(100))


def lasting(inner: MemoryTier | None = None, **changes: Any) -> Wrapped:
    """A tier that outlives caches."""
    inner = inner or MemoryTier(name="lasting")
    return Wrapped(inner, **{"kind": "disk", "close": lambda: None} | changes)


def again(tier: Any, shape: Geometry | None = None, *, share: float = 1.0, **options: Any) -> KV:
    """Another process with the tier, whose audits are listened to."""
    kv = make_kv(shape or simple(), tiers=[tier], audit=share, **options)
    kv.heard = []
    kv.bus.subscribe(kv.heard.append, Audited, Quarantined, Warned)
    return kv


def stored(tier: Any, shape: Geometry | None = None, tokens: Items[int] = TEXT, **o: Any) -> None:
    """Writes a prompt to the tier."""
    with make_kv(shape or simple(), tiers=[tier], **o) as kv:
        published(kv, tokens)
        assert kv.flush()


def key(kv: KV, page: int, group: int = 0, tokens: Items[int] = TEXT) -> bytes:
    with kv._probe(tokens, None, ()) as seq:
        return seq.key(group, page)


def spoil(kv: KV, tier: Any, page: int, group: int = 0, by: float = 1.0) -> bytes:
    """Changes one number of a stored page, digests and all."""
    name = key(kv, page, group)
    body = bytearray(tier.frames[name][1])
    numbers = torch.frombuffer(body, dtype=torch.float32)
    numbers[5] += by
    tier.forge(name, bytes(body))
    return name


def heard(kv: KV, kind: type[Event]) -> list[Any]:
    return [event for event in kv.heard if type(event) is kind]


def counts(kv: KV) -> tuple[int, int, int]:
    report = kv.stats()["audit"]
    return report["audited"], report["mismatches"], report["skipped"]


# ---- sound pages


def test_every_restored_page_is_audited_once_and_found_exact() -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        with kv.open(TEXT) as seq:
            prefill(kv, seq)
            check_content(kv, seq, TEXT)
            audit(kv)
            assert seq.publishable
        events = heard(kv, Audited)
        assert [(e.tier, e.group, e.page, e.codec) for e in events] == [
            ("lasting", 0, page, "raw") for page in range(12)
        ]
        assert all(e.error == 0 < e.bound for e in events)
        assert counts(kv) == (12, 0, 0) and kv.stats()["audit"]["waiting"] == 0
        assert kv.metrics.total("audited_pages_total", tier="lasting", codec="raw") == 12
        with kv.open(TEXT) as seq:  # it lies on the device now
            assert seq.reused == len(TEXT) - 1 and not due(seq)
        assert kv.flush()


def test_nothing_is_audited_unless_asked_for() -> None:
    tier = lasting()
    stored(tier)
    with again(tier, share=0.0) as kv:
        spoil(kv, tier, 3)
        prefill(kv, kv.open(TEXT)).close()
        assert counts(kv) == (0, 0, 0) and not kv.heard


def test_pages_are_sampled_by_their_key_in_every_process_alike() -> None:
    tier, tokens = lasting(), list(range(1000))
    stored(tier, tokens=tokens, pages=300)
    chosen = []
    for _ in range(2):
        with again(tier, share=0.3, pages=300) as kv:
            prefill(kv, kv.open(tokens)).close()
            chosen.append([e.page for e in heard(kv, Audited)])
            wanted = [p for p in range(124) if key(kv, p, tokens=tokens)[:8][::-1] < _share(0.3)]
            assert chosen[-1] == wanted
    assert chosen[0] == chosen[1] and 20 <= len(chosen[0]) <= 55


def _share(share: float) -> bytes:
    return round(share * 2**64).to_bytes(8, "big")


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_between_none_and_all(share: float) -> None:
    with pytest.raises(ConfigError, match=r"`audit`"):
        make_kv(audit=share)


# ---- wrong pages


@pytest.mark.parametrize("page", [0, 5, 11])
def test_a_wrong_page_is_found_forgotten_and_computed_anew(page: int) -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        bad = spoil(kv, tier, page)
        with pytest.warns(UserWarning, match="restored from lasting is not what the model"):
            seq = prefill(kv, kv.open(TEXT))
        check_content(kv, seq, TEXT)  # although it was found wrong after it had been restored
        audit(kv)
        assert seq.publishable
        (told,) = heard(kv, Quarantined)
        assert (told.tier, told.key, told.reason) == ("lasting", bad, "audit")
        (wrong,) = [e for e in heard(kv, Audited) if e.error > e.bound]
        assert wrong.page == page and counts(kv) == (page + 1, 1, 0)
        assert [w.code for w in heard(kv, Warned)] == ["audit"]
        assert kv.metrics.total("quarantined_total", tier="lasting") == 1
        seq.close()
        assert kv.flush()
    with again(tier) as kv:  # what was written then is right
        prefill(kv, kv.open(TEXT)).close()
        assert counts(kv) == (12, 0, 0)


def test_nothing_of_a_page_is_copied_before_it_is_audited() -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        spoil(kv, tier, 0)
        kv.warm(TEXT)
        fork = [*TEXT[:5], 99, *range(200, 200 + PAGE)]
        check_content(kv, prefill(kv, kv.open(fork)), fork)


def test_what_continues_a_wrong_page_goes_with_it_in_every_group() -> None:
    tier, shape = lasting(), geometry()
    other = [*TEXT[:48], *[7] * 30]
    stored(tier, shape)
    stored(tier, shape, other)
    with again(tier, shape) as kv:
        spoil(kv, tier, 1)
        with pytest.warns(UserWarning, match="flowkv scrub"):
            seq = prefill(kv, kv.open(TEXT, limit=2 * PAGE))
        seq.close()
        assert kv.flush()
        assert kv.explain(other).known == 48  # computed anew with TEXT
        assert key(kv, 9, tokens=other) not in tier.frames
        assert key(kv, 9, 1, tokens=other) not in tier.frames
        assert key(kv, 9) in tier.frames and key(kv, 0) in tier.frames


def test_sequences_that_use_a_wrong_page_publish_nothing_more() -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        spoil(kv, tier, 2)
        first, second = kv.open(TEXT), kv.open([*TEXT[:40], 1, 2, 3])
        with pytest.warns(UserWarning):
            wrong = kv.audit(first, write)
        assert wrong == 1 and first.length == 2 * PAGE and first.publishable
        assert not second.publishable and second.length == 40
        prefill(kv, second)
        prefill(kv, first)
        check_content(kv, first, TEXT)
        assert kv.explain([*TEXT[:40], 1, 2, 3, 4, 5, 6, 7, 8, 9]).known == 40
        audit(kv)
        first.close(), second.close()


def test_a_complete_sequence_is_not_cut() -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        spoil(kv, tier, 2)
        seq = kv.open(TEXT[:96], limit=96)
        with pytest.warns(UserWarning):
            assert kv.audit(seq, write) == 1
        assert seq.length == 96 and not seq.publishable
        seq.close()


@pytest.mark.parametrize("page", [7, 11])
def test_an_overlapped_restore_is_computed_anew_from_a_wrong_page_on(page: int) -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        spoil(kv, tier, page)
        seq, lasts = kv.open(TEXT, wait=False), []

        def forward(step: Step) -> int:
            write(step)
            lasts.append((step.audits, int(step.seqs[0].length + step.counts[0])))
            return len(lasts)

        with pytest.warns(UserWarning):
            outputs = kv.restore([seq], forward)
        assert outputs == [len(lasts)] and lasts[-1] == (False, 100)
        assert lasts.count((False, 100)) == 2
        check_content(kv, seq, TEXT)
        wrong = [e.page for e in heard(kv, Audited) if e.error > e.bound]
        assert seq.publishable and wrong == [page] and counts(kv)[1:] == (1, 0)
        audit(kv)
        seq.close()
    with again(tier) as kv:
        seq, seen = kv.open(TEXT, wait=False), []
        (output,) = kv.restore([seq], lambda step: seen.append(step.audits) or write(step) or step)
        assert not output.audits and counts(kv) == (seen.count(True), 0, 0)
        assert seen.count(True) >= 6, "what was loaded, not what was computed"
        seq.close()


def test_a_page_that_can_only_be_read_here_is_not_believed_again() -> None:
    inner = MemoryTier(name="lasting")
    stored(lasting(inner))
    tier = lasting(inner, writable=False, shared=True)
    with again(tier) as kv:
        bad = spoil(kv, tier, 4)
        with pytest.warns(UserWarning):
            prefill(kv, kv.open(TEXT)).close()
        assert bad in inner.frames
        bind(kv, kv.geometry, _name("other"))
        bind(kv, kv.geometry, _name("toy"))
        for block in list(kv.planner.store.index):
            kv.planner.store.forget(block)
        assert kv.open(TEXT).length == 4 * PAGE


def _name(model: str) -> Any:
    from flowkv import Namespace

    return Namespace(model=model)


def test_numbers_that_are_none_are_wrong() -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        spoil(kv, tier, 1, by=math.nan)
        with pytest.warns(UserWarning):
            prefill(kv, kv.open(TEXT)).close()
        assert heard(kv, Audited)[-1].error == math.inf


# ---- what cannot be audited


def test_windows_are_loaded_for_it_where_they_are_there_and_counted_where_not() -> None:
    tier, shape = lasting(), geometry()
    stored(tier, shape)
    with again(tier, shape) as kv:
        prefill(kv, kv.open(TEXT)).close()
        assert counts(kv)[1:] == (0, 0)
        assert {e.group for e in heard(kv, Audited)} == {0, 1}
    with again(tier, shape) as kv:
        tier.delete([key(kv, page, 1) for page in range(9)])
        seq = kv.open(TEXT)
        assert seq.length == 99
        prefill(kv, seq).close()
        audited, wrong, skipped = counts(kv)
        # A page needs the window before it, of which the tier has pages 9, 10 and 11 only.
        reach = -(-(WINDOW - 1) // PAGE)
        assert wrong == 0 and skipped >= 9 + reach - 1 and audited + skipped >= 12


def test_weights_that_changed_meanwhile_are_no_reason() -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        seq = kv.open(TEXT)
        bind(kv, kv.geometry, _name("other"))
        prefill(kv, seq, tag=1).close()
        assert counts(kv) == (0, 0, 12) and not kv.heard


def test_without_room_nothing_is_audited_and_nothing_fails() -> None:
    tier = lasting()
    stored(tier)
    with again(tier, pages=16, max_rows=4) as kv:
        seq = kv.open(TEXT)
        pool = kv.planner.store.pool(0)
        rest = kv.planner.allocate_raw([pool.available(1)])[0]
        assert rest and kv.audit(seq, write) == 0
        assert counts(kv) == (0, 0, 12)
        for page in rest:
            pool.release(page)
        prefill(kv, seq).close()
    with again(tier, max_rows=1) as kv:
        prefill(kv, kv.open(TEXT)).close()
        assert counts(kv) == (0, 0, 12)


def test_leaving_the_loop_during_an_audit_leaves_nothing_behind() -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        seq = kv.open(TEXT)
        for step in kv.prefill([seq]):
            assert step.audits and step.tokens.tolist() == [TEXT[:PAGE]]
            break
        audit(kv)
        assert len(kv._open) == 1 and seq.length == 99
        with pytest.raises(RuntimeError, match="broken"):
            kv.audit(seq, _broken)
        audit(kv)
        seq.close()


def _broken(step: Step) -> None:
    raise RuntimeError("broken")


@pytest.mark.at_once
def test_audits_are_no_measure_of_the_model() -> None:
    tier = lasting()
    stored(tier)
    with again(tier) as kv:
        told: list[int] = []
        kv.planner.measured = lambda tokens, seconds, _: told.append(tokens)
        prefill(kv, kv.open([*TEXT, *range(8)]), chunk=16)
        assert told == [8]


# ---- codecs


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoded_pages_are_held_to_what_their_codec_may_lose(codec: str, dtype: str) -> None:
    page = 64 if "4" in codec else 32
    shape = simple(layers=2, head_dim=64, page_size=page, dtype=dtype)
    tier, tokens = lasting(), list(range(5 * page + 9))
    stored(tier, shape, tokens, codec=codec, recent_tokens=0)
    with again(tier, shape, codec=codec, recent_tokens=0) as kv:
        seq = prefill(kv, kv.open(tokens), chunk=2 * page)
        events = heard(kv, Audited)
        assert [e.codec for e in events] == [codec] * 5 and counts(kv) == (5, 0, 0)
        if codec != "raw":
            assert all(0 < e.error < e.bound < 1 for e in events)
        assert seq.publishable
        seq.close()
        audit(kv)


@pytest.mark.parametrize("codec", CODECS)
def test_another_page_in_its_place_is_found_in_every_codec(codec: str) -> None:
    page = 64 if "4" in codec else 32
    shape = simple(layers=2, head_dim=64, page_size=page)
    tier, tokens = lasting(), list(range(5 * page + 9))
    stored(tier, shape, tokens, codec=codec, recent_tokens=0)
    with again(tier, shape, codec=codec, recent_tokens=0) as kv:
        other = tier.frames[key(kv, 1, tokens=tokens)][1]
        tier.forge(key(kv, 3, tokens=tokens), other)
        with pytest.warns(UserWarning):
            seq = prefill(kv, kv.open(tokens), chunk=2 * page)
        assert [e.page for e in heard(kv, Audited) if e.error > e.bound] == [3]
        seq.close()


# ---- the sample


def test_the_sample_forgets_the_oldest_beyond_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_pages, "MOST_WAITING", 3)
    sample, keys = Samples(1.0), [bytes([n]) * 32 for n in range(5)]
    for one in [*keys[:3], keys[0], *keys[3:]]:
        sample.came(one, "tier")
    assert [sample.waiting(one) for one in keys] == [True, False, False, True, True]
    assert sample.take(keys[0]) == "tier" and sample.take(keys[0]) == "" and len(sample) == 2


def test_the_worst_error_is_that_of_sound_pages() -> None:
    sample = Samples(0.5)
    for error in (0.01, 0.03, 5.0, math.inf, math.nan):
        sample.judged(Verdict(error, 0.1))
    assert (sample.audited, sample.mismatches) == (5, 3) and sample.worst == pytest.approx(0.3)
