"""Keys: pinned, equal to an independent implementation, and different whenever anything differs."""

from __future__ import annotations

import hashlib
import json
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv import Namespace, Salt, Shard
from tests.inside import (
    KEY_BYTES,
    ROOT,
    ConfigError,
    KeyChain,
    TokenError,
    as_tokens,
    tenant_salt,
    within,
)

NAMESPACE = hashlib.sha256(b"a model").digest()
IMAGE, SOUND = hashlib.sha256(b"image").digest(), hashlib.sha256(b"sound").digest()


def independent_key(  # the specification in the head of keys.py, written a second time
    tag: bytes,
    namespace: bytes,
    tenant: bytes,
    group: int,
    parent: bytes,
    tokens: list[int],
    salts: list[tuple[int, bytes]],
) -> bytes:
    head = struct.pack("<16s32s32sI32s", tag, namespace, tenant, group, parent)
    body = struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)
    tail = struct.pack("<I", len(salts))
    for offset, digest in sorted(salts):
        tail += struct.pack("<I32s", offset, digest)
    return hashlib.sha256(head + body + tail).digest()


def chain(
    namespace: bytes = NAMESPACE, tenant: bytes = tenant_salt("a"), group: int = 0, size: int = 4
) -> KeyChain:
    return KeyChain(namespace, tenant, group, size)


def keys(tokens: list[int], salts: list[Salt] | None = None, **fields: object) -> list[bytes]:
    return chain(**fields).keys(as_tokens(tokens), salts or [])  # type: ignore[arg-type]


GOLDEN = {  # a change here makes every stored page unreachable: it wants a new tag in keys.py
    "namespace": "6f52e19ba2b4124efed6f9027cb5598331034fa0691af74026d2aa5d7860c167",
    "tenant": "24db8025947ecd902698a8bcf99b1376fa60db708119f02fb763a5712292cb18",
    "tenant with secret": "6de7b419c61876bf40d7d99b05385de01790962ad28a16ef3e3dc4db384ea510",
    "first page": "befdb472520f67ea22d8ae7f5c342305cde95269d8c6792037962a08187b4b1f",
    "second page, salted": "1d1d34ccc26d43bde34b2977875c38d9efd9f468071639b884b5514f187824a9",
    "state": "d76b8a36ba0a8b7e778dfd18fa6b04f8300230da1fb29ca5a005a75000086f5b",
}


def test_golden_vectors() -> None:
    namespace = Namespace(
        model="tiny",
        revision="main",
        weights="00ff",
        rope="default",
        geometry="ab" * 32,
        shard=Shard(rank=1, world=2, head_start=4, head_stop=8),
    ).digest()
    tenant = tenant_salt("alice")
    # within a vector every 32-bit token is legal, 2**32 - 1 included
    tokens = as_tokens([1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9, 10, 11])
    links = KeyChain(namespace, tenant, 3, 4)
    first, second = links.keys(tokens, [Salt(6, IMAGE)])
    state = links.state(second, tokens[8:])
    assert {
        "namespace": namespace.hex(),
        "tenant": tenant.hex(),
        "tenant with secret": tenant_salt("alice", b"\1\2\3").hex(),
        "first page": first.hex(),
        "second page, salted": second.hex(),
        "state": state.hex(),
    } == GOLDEN


def test_golden_vectors_are_what_the_specification_says() -> None:
    fields = {
        "model": "tiny",
        "revision": "main",
        "weights": "00ff",
        "adapter": "",
        "rope": "default",
        "geometry": "ab" * 32,
        "shard": {"rank": 1, "world": 2, "head_start": 4, "head_stop": 8},
    }
    text = json.dumps(["namespace/1", fields], separators=(",", ":"))
    namespace = hashlib.sha256(text.encode()).digest()
    tenant = hashlib.blake2b(b"alice", digest_size=32, person=b"flowkv.tenant/1").digest()
    secret = hashlib.blake2b(
        b"alice", digest_size=32, key=b"\1\2\3", person=b"flowkv.tenant/1"
    ).digest()
    page, state = b"flowkv.page/1", b"flowkv.state/1"
    first = independent_key(page, namespace, tenant, 3, bytes(32), [1, 2, 3, 2**32 - 1], [])
    second = independent_key(page, namespace, tenant, 3, first, [5, 6, 7, 8], [(2, IMAGE)])
    third = independent_key(state, namespace, tenant, 3, second, [9, 10, 11], [])
    computed = [namespace, tenant, secret, first, second, third]
    assert [digest.hex() for digest in computed] == list(GOLDEN.values())


token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(token_lists, st.integers(0, 9), st.integers(1, 9), st.data())
def test_equals_the_independent_implementation(
    tokens: list[int], group: int, size: int, data: st.DataObject
) -> None:
    places = st.integers(0, max(0, len(tokens) - 1))
    salts = data.draw(st.lists(st.tuples(places, st.sampled_from([IMAGE, SOUND])), max_size=4))
    expected, parent = [], ROOT
    for first in range(0, len(tokens) - size + 1, size):
        part = [(at - first, digest) for at, digest in salts if first <= at < first + size]
        tag = b"flowkv.page/1"
        body = tokens[first : first + size]
        parent = independent_key(tag, NAMESPACE, tenant_salt("a"), group, parent, body, part)
        expected.append(parent)
    assert keys(tokens, [Salt(*salt) for salt in salts], group=group, size=size) == expected


@given(token_lists, st.integers(0, 12))
def test_incremental_equals_whole(tokens: list[int], start: int) -> None:
    whole = keys(tokens)
    start = min(start, len(whole))
    parent = whole[start - 1] if start else ROOT
    assert chain().keys(as_tokens(tokens), start=start, parent=parent) == whole[start:]


@given(token_lists, token_lists)
def test_keys_agree_exactly_as_far_as_the_tokens(left: list[int], right: list[int]) -> None:
    common = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        common += 1
    one, two = keys(left + left), keys(left + right)
    agree = sum(a == b for a, b in zip(one, two, strict=False))
    assert agree == min(len(one), len(two), (len(left) + common) // 4)
    assert one[:agree] == two[:agree]


def test_everything_else_changes_the_key() -> None:
    tokens = list(range(8))
    variants = [
        *(keys(tokens), keys(tokens, namespace=hashlib.sha256(b"another").digest())),
        keys(tokens, tenant=tenant_salt("b")),
        *(keys(tokens, tenant=tenant_salt("a", b"secret")), keys(tokens, tenant=tenant_salt(""))),
        *(keys(tokens, group=1), keys(tokens, size=2), keys(tokens, [Salt(0, IMAGE)])),
        *(keys(tokens, [Salt(1, IMAGE)]), keys(tokens, [Salt(0, SOUND)])),
        keys(tokens, [Salt(0, IMAGE), Salt(0, SOUND)]),
        *(keys(tokens, [Salt(0, IMAGE), Salt(0, IMAGE)]), keys([7, *tokens[1:]])),
        [chain().state(ROOT, as_tokens(tokens[:4]))],
        [chain().page(NAMESPACE, as_tokens(tokens[:4]))],
        [chain().page(ROOT, as_tokens(tokens[:3]))],
    ]
    flat = [key for variant in variants for key in variant]
    assert len(set(flat)) == len(flat)
    assert {len(key) for key in flat} == {KEY_BYTES}


def test_a_salt_reaches_all_later_pages_and_no_earlier() -> None:
    tokens = list(range(12))
    plain, salted = keys(tokens), keys(tokens, [Salt(7, IMAGE)])
    assert [a == b for a, b in zip(plain, salted, strict=True)] == [True, False, False]
    assert keys(tokens, [Salt(12, IMAGE)]) == plain  # beyond the tokens: of no full page


def test_the_order_of_salts_does_not_matter() -> None:
    tokens, salts = list(range(8)), [Salt(5, IMAGE), Salt(1, SOUND), Salt(5, SOUND)]
    assert keys(tokens, salts) == keys(tokens, salts[::-1])


def test_within() -> None:
    salts = [Salt(3, IMAGE), Salt(4, SOUND), Salt(8, IMAGE)]
    assert within(salts, 4, 4) == [Salt(0, SOUND)]
    assert within(salts, 0, 9) == salts
    assert within(salts, 9, 4) == []


def test_every_field_of_a_namespace_matters() -> None:
    base = Namespace(model="m")
    variants = [base]
    for field in ("model", "revision", "weights", "adapter", "rope", "geometry"):
        variants.append(msgspec.structs.replace(base, **{field: "x"}))
    for shard in (Shard(1, 2), Shard(0, 2), Shard(0, 1, 1), Shard(0, 1, 0, 1)):
        variants.append(msgspec.structs.replace(base, shard=shard))
    assert len({variant.digest() for variant in variants}) == len(variants)


def test_long_secrets_count_whole() -> None:
    long = bytes(range(64))
    salts = {tenant_salt("a", long), tenant_salt("a", long + b"x"), tenant_salt("a", long + b"y")}
    assert len(salts) == 3


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], (1, 2, 3), range(1, 4), iter([1, 2, 3]), np.array([1, 2, 3], np.int16)]
)
def test_as_tokens_takes_any_flat_integers(tokens: object) -> None:
    array = as_tokens(tokens)  # type: ignore[arg-type]
    assert array.dtype == np.uint32
    assert array.tolist() == [1, 2, 3]


def test_as_tokens_copies() -> None:
    given_array = np.array([1, 2], np.uint32)
    as_tokens(given_array)[0] = 9
    assert given_array.tolist() == [1, 2]
    assert as_tokens([]).dtype == np.uint32


@pytest.mark.parametrize(
    ("tokens", "vocabulary"),
    [
        *(([[1, 2]], 1 << 32), ([[1, 2], [3]], 1 << 32), (np.ones((1, 2), np.int64), 1 << 32)),
        *((np.array(5), 1 << 32), ([1.0], 1 << 32), (["1"], 1 << 32), ("12", 1 << 32)),
        *(([True], 1 << 32), ([-1], 1 << 32), ([1 << 32], 1 << 32), ([1 << 32], 1 << 40)),
        *(([1 << 70], 1 << 32), ([(1 << 64) - 1, -1], 1 << 32), ([50], 50), (None, 1 << 32)),
        (5, 1 << 32),
    ],
)
def test_bad_tokens(tokens: object, vocabulary: int) -> None:
    with pytest.raises(TokenError) as caught:
        as_tokens(tokens, vocabulary)  # type: ignore[arg-type]
    assert caught.value.remedy


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ConfigError):
        KeyChain(NAMESPACE[:31], tenant_salt("a"), 0, 4)
    with pytest.raises(ConfigError):
        KeyChain(NAMESPACE, b"alice", 0, 4)
    with pytest.raises(ConfigError):
        KeyChain(NAMESPACE, tenant_salt("a"), -1, 4)
    with pytest.raises(TokenError):
        chain().page(b"", as_tokens([1]))
    with pytest.raises(TokenError):
        Salt(0, b"short")
    with pytest.raises(TokenError):
        Salt(-1, IMAGE)
