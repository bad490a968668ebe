"""Snapshots of recurrent layers as bytes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings

from tests.inside import StoreError, decode_state, encode_state

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)),
        max_size=4,
    ),
    st.integers(-(2**40), 2**40),
)
def test_a_state_comes_back_bit_for_bit(
    tensors: dict[str, tuple[torch.dtype, list[int]]], number: int
) -> None:
    values: dict[str, Any] = {
        name: (torch.rand(shape or ()) * 100).to(dtype) for name, (dtype, shape) in tensors.items()
    }
    values |= {"n": number, "text": "x", "list": [1, 2.5, None, b"\0"]}
    blob = encode_state(values)
    assert len(blob) % 4096 == 0
    for tail in (b"", bytes(4096), b"junk"):
        back = decode_state(blob + tail)
        assert back.keys() == values.keys()
        assert all(same(values[name], back[name]) for name in values)


def test_views_and_gradients_are_kept_as_plain_values() -> None:
    x = torch.arange(12.0, requires_grad=True).view(3, 4)
    back = decode_state(encode_state({"x": x.t()[1:]}))["x"]
    assert torch.equal(back, x.detach().t()[1:]) and not back.requires_grad
    back += 1  # its memory is its own


@pytest.mark.parametrize("value", [object(), torch.zeros(2, dtype=torch.complex64)])
def test_what_is_no_plain_value_is_refused(value: object) -> None:
    with pytest.raises(StoreError, match=r"Keep tensors|Convert it"):
        encode_state({"x": value})


SOUND = encode_state({"a": torch.arange(6).view(2, 3), "b": torch.zeros(3), "n": 1})


@settings(max_examples=100)
@given(st.data())
def test_damaged_states_are_refused_or_of_the_right_form(data: st.DataObject) -> None:
    blob = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, 120))] = data.draw(st.integers(0, 255))
    del blob[data.draw(st.sampled_from((0, 3, 4, 60, 4095, len(blob)))) :]
    try:
        decode_state(bytes(blob))
    except StoreError as error:
        assert "damaged" in str(error)


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(blob: bytes) -> None:
    with pytest.raises(StoreError, match="damaged"):
        decode_state(blob)


@pytest.mark.parametrize(
    "shape", [(-1, -6), (1 << 62, 1 << 62), (0, 1 << 62), (1 << 40, 1 << 40, 0), (7,) * 40]
)
def test_shapes_are_checked_before_memory_is_taken(shape: tuple[int, ...]) -> None:
    described = {"tensors": [{"name": "x", "dtype": "uint8", "shape": shape}], "plain": {}}
    head = msgspec.msgpack.encode(described)
    with pytest.raises(StoreError, match="'x' is damaged"):
        decode_state(len(head).to_bytes(4, "little") + head + bytes(64))


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_tensors_without_bytes_are_refused_in_words(tensor: torch.Tensor) -> None:
    with pytest.raises(StoreError, match="tensor 'x' has no bytes of its own"):
        encode_state({"x": tensor})


def test_deep_nesting_is_refused() -> None:
    head = b"\x82\xa7tensors\x90\xa5plain\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(StoreError, match="damaged"):
        decode_state(len(head).to_bytes(4, "little") + head)
