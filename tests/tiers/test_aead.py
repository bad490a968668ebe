from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from flowkv.tiers import BadFrame, Envelope, Header
from tests.clock import together
from tests.inside import (
    AES_256_GCM,
    DIGEST_AT,
    ConfigError,
    FrameCipher,
    Keyring,
    Lossless,
    MissingDependencyError,
    fixed_fields,
)
from tests.inside import envelope as keyring

from .frames import info_of, key_of
from .wraps import SECRET, envelope_of, load, refused_as, store

OTHER = bytes(range(1, 33))
GOLDEN = "1a974800e12639e0a5b22cfcf3572c30d1159d79dc5ff44723233e0988db4145"
STRIPE = 4096

Attack: TypeAlias = tuple[Envelope, bytes | bytearray, bytes, int]
"""What a reader gets: its envelope, bytes, the key it wishes for, and a generation."""


class Attacks:
    """S3: what somebody can do who may write to the store, but does not know the secret.

    All frames but one are genuine: sealed with the secret, or with another one, for other keys,
    tenants, layouts and generations.
    """

    def __init__(self) -> None:
        sized = {"stripes": 4, "step": STRIPE, "generation": 7}
        self.good = store("aead", **sized)
        self.again = store("aead", **sized)  # the same frame, sealed again
        self.later = store("aead", **{**sized, "generation": 8})
        self.other = store("aead", "other", **sized)
        self.tenant = store("aead", **sized, tenant=key_of("another tenant"))
        self.layout = store("aead", **sized, layout=bytes(16))
        self.foreign = store("aead", **sized, secret=OTHER)
        self.plain = store("xxh3", **sized)
        self.frames = (
            *(self.again, self.later, self.other, self.tenant, self.layout),
            *(self.foreign, self.plain),
        )

    def of(self, data: bytes | bytearray) -> Attack:
        return self.good.envelope, data, self.good.key, 7

    def flip(self, rng: random.Random) -> Attack:
        data = bytearray(self.good.data)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return self.of(data)

    def overwrite(self, rng: random.Random) -> Attack:
        data = bytearray(self.good.data)
        size = rng.randint(1, 300)
        at = rng.randrange(len(data) - size)
        data[at : at + size] = rng.randbytes(size)
        return self.of(data)

    def splice(self, rng: random.Random) -> Attack:
        """Stripes of another frame, or their tags with them."""
        data, of = bytearray(self.good.data), rng.choice(self.frames).data
        n = rng.randrange(4)
        at = 4096 + n * STRIPE
        data[at : at + STRIPE] = of[at : at + STRIPE]
        if rng.randrange(2):
            data[256 + 16 * n : 272 + 16 * n] = of[256 + 16 * n : 272 + 16 * n]
        return self.of(data)

    def reorder(self, rng: random.Random) -> Attack:
        """Stripes change places, with their tags or without."""
        data, old = bytearray(self.good.data), self.good.data
        places = rng.sample(range(4), 4)
        if places == [0, 1, 2, 3]:
            places = [1, 0, 2, 3]
        tags = rng.randrange(2)
        for to, of in enumerate(places):
            a, b = 4096 + to * STRIPE, 4096 + of * STRIPE
            data[a : a + STRIPE] = old[b : b + STRIPE]
            if tags:
                data[256 + 16 * to : 272 + 16 * to] = old[256 + 16 * of : 272 + 16 * of]
        return self.of(data)

    def swap_header(self, rng: random.Random) -> Attack:
        """The header of one genuine frame, the stripes of another."""
        of = rng.choice(self.frames)
        heads = (self.good.data, of.data)
        first = rng.randrange(2)
        return self.of(heads[first][:4096] + heads[1 - first][4096:])

    def transplant(self, rng: random.Random) -> Attack:
        """Fields of another frame, its salt and its tag among them."""
        data, of = bytearray(self.good.data), rng.choice(self.frames).data
        for field in rng.sample(FIELDS, rng.randint(1, 4)):
            data[field] = of[field]
        if data == self.good.data:
            data[DIGEST_AT] = self.again.data[DIGEST_AT]
        return self.of(data)

    def replay(self, rng: random.Random) -> Attack:
        """A whole genuine frame where another one should be."""
        of = rng.choice((self.later, self.other, self.foreign, self.plain))
        return self.of(of.data)

    def steal(self, rng: random.Random) -> Attack:
        """The right frame, read with another secret or for another key."""
        if rng.randrange(2):
            return envelope_of("aead", rng.randbytes(32)), self.good.data, self.good.key, 7
        return self.good.envelope, self.good.data, rng.randbytes(32), 7

    def forget(self, rng: random.Random) -> Attack:
        """A frame that its author sealed with another secret, under the right names."""
        forged = store("aead", stripes=1, step=64, generation=7, secret=rng.randbytes(16))
        return self.of(forged.data)

    def cut(self, rng: random.Random) -> Attack:
        return self.of(self.good.data[: rng.randrange(len(self.good.data))])


FIELDS = (
    *(slice(0, 16), DIGEST_AT, slice(32, 40), slice(40, 72), slice(72, 104), slice(104, 136)),
    *(slice(136, 168), slice(168, 184), slice(184, 216), slice(216, 224), slice(224, 232)),
    *(slice(232, 248), slice(248, 256), slice(256, 320)),
)
WAYS = [name for name in vars(Attacks) if not name.startswith("_") and name != "of"]


def try_attacks(count: int, seed: int) -> None:
    attacks, rng = Attacks(), random.Random(seed)
    assert load(*attacks.of(attacks.good.data)[:3], generation=7) == attacks.good.body
    for number in range(count):
        way = WAYS[number % len(WAYS)]
        envelope, data, key, generation = getattr(attacks, way)(rng)
        if data == attacks.good.data and key == attacks.good.key and way != "steal":
            continue  # random bytes may be the right ones
        with pytest.raises(BadFrame):
            load(envelope, data, key, generation=generation)
            pytest.fail(f"{way} was served")
    assert load(*attacks.of(attacks.good.data)[:3]) == attacks.good.body


def test_attacks_are_refused() -> None:
    try_attacks(2000, 1)


@pytest.mark.deep
@pytest.mark.timeout(1200)
def test_attacks_are_refused_however_often() -> None:
    try_attacks(100_000, 2)


@pytest.mark.parametrize("way", ["tenant", "layout"])
def test_frames_of_others_are_others(way: str) -> None:
    """A genuine frame of the same key but another tenant or layout is not refused by its tag.

    Keys are derived from tenant and namespace, so there is none; `accept` refuses the layout.
    """
    frame = getattr(Attacks(), way)
    header = frame.envelope.head(frame.data, frame.key)
    assert header.info != Attacks().good.info


def test_keys_are_derived_as_documented() -> None:
    def hkdf(key: bytes, salt: bytes | None, info: bytes) -> bytes:
        return HKDF(SHA256(), 32, salt, info).derive(key)

    tenant, salt, key = key_of("tenant"), bytes(range(16)), key_of("frame")
    tenant_key = hkdf(SECRET, None, b"flowkv tenant" + tenant)
    frame_key = hkdf(tenant_key, salt, b"flowkv frame" + key)
    ring = Keyring(SECRET)
    assert ring.frame_key(tenant, salt, key) == ring.frame_key(tenant, salt, key) == frame_key
    assert frame_key.hex() == GOLDEN


def test_frames_are_sealed_as_documented() -> None:
    """With the library alone: keys, nonces and associated data, from the bytes of the frame."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    frame = store("aead", stripes=2, step=4096, generation=9)
    data = frame.data
    gcm = AESGCM(Keyring(SECRET).frame_key(data[136:168], data[232:248], data[40:72]))
    fixed = data[:16] + bytes(16) + data[32:256]
    for n in range(2):
        stripe = data[4096 * (n + 1) : 4096 * (n + 2)]
        tag = data[256 + 16 * n : 272 + 16 * n]
        plain = gcm.decrypt((n + 1).to_bytes(12, "little"), stripe + tag, fixed)
        assert plain == frame.body[4096 * n : 4096 * (n + 1)]
    gcm.decrypt(bytes(12), data[16:32], data[:16] + bytes(16) + data[32:4096])


def test_no_key_is_used_for_two_frames() -> None:
    salts = {store("aead", stripes=1, step=64).header.salt for _ in range(200)}
    assert len(salts) == 200
    ring = Keyring(SECRET)
    names = [key_of(n) for n in range(3)]
    keys = {ring.frame_key(a, b[:16], c) for a in names for b in names for c in names}
    assert len(keys) == 27


def test_more_tenants_than_are_remembered() -> None:
    ring = Keyring(SECRET)
    first = ring.frame_key(key_of(0), bytes(16), key_of("x"))
    for n in range(1, 1200):
        ring.frame_key(key_of(n), bytes(16), key_of("x"))
    assert ring.frame_key(key_of(0), bytes(16), key_of("x")) == first
    assert ring._tenant_key.cache_info().currsize == 1024


@pytest.mark.parametrize("kind", ["aead", "aead lossless"])
def test_no_plaintext_is_stored(kind: str) -> None:
    frame = store(kind, stripes=4, step=8192)
    pieces = {frame.body[at : at + 16] for at in range(0, len(frame.body) - 16, 16)}
    stored = frame.data[4096:]
    assert not any(stored[at : at + 16] in pieces for at in range(0, len(stored), 16))
    assert store("aead", stripes=4, step=8192).data[4096:] != stored


def test_no_downgrade() -> None:
    """A reader that wants tags refuses digests, a reader that does not know tags refuses those."""
    plain, sealed = store("xxh3"), store("aead")
    for frame, envelope in (
        (plain, envelope_of("aead")),
        (sealed, envelope_of("xxh3")),
        (sealed, Envelope(integrity="aead")),
        (plain, Envelope(integrity="aead")),
    ):
        with refused_as("integrity"):
            load(envelope, frame.data, frame.key)
        with refused_as("integrity"):
            envelope.open(frame.header, frame.data[4096:], memoryview(bytearray(32768)), 0, 2)


def test_nothing_is_sealed_without_a_key() -> None:
    with refused_as("integrity"):
        Envelope(integrity="aead").seal(key_of(1), info_of(64), bytes(64))


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("spare", [0, 15, 16])
def test_stripes_are_opened_wherever_they_lie(writable: bool, spare: int) -> None:
    header = Header(key_of(1), info_of(4096), bytes(16), 0, AES_256_GCM, bytes(16))
    cipher, plain = (
        FrameCipher(Keyring(SECRET), fixed_fields(header)),
        random.Random(0).randbytes(4096),
    )
    out = memoryview(bytearray(b"\xaa" * 5000))
    tag = cipher.seal_stripe(5, memoryview(plain), out)
    assert bytes(out[4096:]) == bytes(16) + b"\xaa" * (5000 - 4112)
    stored = memoryview(bytearray(b"\xcc" * 7 + bytes(out[:4096]) + b"\xbb" * spare))
    before, target = bytes(stored), memoryview(bytearray(4096))
    view = stored if writable else stored.toreadonly()
    cipher.open_stripes(range(5, 6), view[7:], 4096, tag, target)
    assert target == plain
    for number, wrong in ((4, tag), (5, bytes(16))):
        with pytest.raises(BadFrame):
            cipher.open_stripes(range(number, number + 1), view[7:], 4096, wrong, target)
    assert stored == before


@pytest.mark.parametrize("size", [0, 1, 15])
def test_short_secrets_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=r"at least 16 random bytes.*token_bytes"):
        Keyring(bytes(size))


def test_the_secret_is_not_shown() -> None:
    ring = Keyring(b"very secret bytes indeed")
    assert "secret" not in repr(ring) + str(ring)


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'flowkv\[aead\]'"):
        Keyring(SECRET)


def test_many_threads_may_share_an_envelope() -> None:
    envelope = envelope_of("aead lossless")

    def work(name: int) -> None:
        for turn in range(10):
            frame = store("aead lossless", (name, turn), stripes=2, step=16384)
            assert load(envelope, frame.data, frame.key) == frame.body

    together(*(partial(work, n) for n in range(4)))


# --- a machine that goes on twice from one image -----------------------------------------------


@pytest.fixture
def cloned(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Envelope]:
    """Makes envelopes of clones: the same random numbers, times, process and counts in each."""

    def clone() -> Envelope:
        numbers = random.Random(0)
        monkeypatch.setattr(os, "urandom", numbers.randbytes)
        monkeypatch.setattr(time, "time_ns", lambda: 1)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: 2)
        lossless = Lossless(lambda: 1.0)
        return Envelope(integrity="aead", keyring=Keyring(SECRET), lossless=lossless)

    return clone


def sealed_by(clone: Envelope, body: bytes, **changes: Any) -> tuple[bytes, bytes]:
    """Salt and stored stripes of a frame of one stripe."""
    generation = changes.pop("generation", 0)
    info = info_of(len(body), **changes)
    sealed = clone.seal(key_of("page"), info, body, generation=generation)
    return sealed.head.salt, b"".join(bytes(part) for part in sealed.parts)


def test_clones_that_seal_other_content_share_no_key_stream(
    cloned: Callable[[], Envelope], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring, "_where", lambda: b"here")  # a process' times run on
    one, other = (random.Random(n).randbytes(STRIPE) for n in range(2))
    (salt, first), (other_salt, second) = (sealed_by(cloned(), body) for body in (one, other))
    assert salt != other_salt

    def xor(a: bytes, b: bytes) -> bytes:
        return bytes(x ^ y for x, y in zip(a, b, strict=True))

    assert xor(first, second) != xor(one, other), "one key stream for two contents"
    assert sealed_by(cloned(), one) == (salt, first), "the same again tells nothing new"


@pytest.mark.parametrize(
    "changes",
    [
        *({"generation": 1}, {"tenant": key_of("another")}, {"layout": bytes(16)}),
        *({"codec": 1, "fidelity": 1}, {"parent": key_of("elsewhere")}, {"tokens": 3}),
    ],
)
def test_clones_that_say_something_else_of_a_frame_share_no_key(
    cloned: Callable[[], Envelope], changes: dict[str, Any]
) -> None:
    body = random.Random(0).randbytes(STRIPE)
    assert sealed_by(cloned(), body)[0] != sealed_by(cloned(), body, **changes)[0]


@pytest.mark.parametrize("file", keyring._WHERE)
def test_two_machines_processes_or_starts_draw_other_salts(
    cloned: Callable[[], Envelope], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    body = random.Random(0).randbytes(STRIPE)
    salt, _ = sealed_by(cloned(), body)
    read = Path.read_bytes

    def other(path: Path) -> bytes:
        return b"of a clone" if str(path) == file else read(path)

    monkeypatch.setattr(Path, "read_bytes", other)
    assert sealed_by(cloned(), body)[0] != salt


@pytest.mark.parametrize("source", ["time_ns", "perf_counter_ns"])
def test_a_clone_that_goes_on_at_another_time_draws_other_salts(
    cloned: Callable[[], Envelope], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    body, later = random.Random(0).randbytes(STRIPE), cloned()
    salt, _ = sealed_by(later, body)
    later = cloned()
    monkeypatch.setattr(time, source, lambda: 3)
    assert sealed_by(later, body)[0] != salt
