"""`flowkv calibrate`: a basis in a file, and what objects of LMCache are with it."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch

import flowkv
from flowkv import cli
from flowkv.data import tiny_path
from tests.inside import open_basis, page_layout

pytestmark = pytest.mark.usefixtures("one_thread")


def ascii_text(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return "".join(map(chr, torch.randint(32, 127, (count,), generator=generator).tolist()))


def told(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    (tmp_path / "text.txt").write_text(ascii_text(9 * 256, 1))
    given = ["calibrate", "--model", str(tiny_path()), "--text", str(tmp_path / "text.txt")]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", flowkv.ExperimentalWarning)
        status = cli.main([*given, "--out", str(tmp_path / "basis.kvt"), *words])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out + err


def test_a_basis_of_a_file_codes_objects_of_256_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = told(tmp_path, capsys, "--kl", "0.02")
    assert status == 0 and "basis.kvt" in said and "bits a value at a divergence of 0.0" in said
    found = open_basis(tmp_path / "basis.kvt")
    assert found.model == str(tiny_path())
    model, encode, *_ = flowkv.load(tiny_path())
    ids = torch.tensor([encode(ascii_text(5 * 256, 2))])
    with torch.no_grad():
        cache = model(ids[:, : 4 * 256], use_cache=True).past_key_values
        wanted = model(ids[:, 4 * 256 :], past_key_values=copy.deepcopy(cache)).logits[0]
    for dtype in ("float32", "bfloat16"):
        own, bits = copy.deepcopy(cache), 0.0
        stacked = [torch.stack([getattr(x, n)[0] for x in own.layers]) for n in ("keys", "values")]
        lay = found.coder.layout
        group = flowkv.LayerGroup(
            layers=tuple(range(lay.layers)),
            kv_heads=lay.kv_heads,
            head_dim=lay.head_dim,
            value_dim=lay.value_dim,
            dtype=dtype,
        )
        coder = found.coder.fitted(page_layout(group, 256))
        for number in range(4):
            body = bytearray(coder.layout.page_bytes)
            here = slice(256 * number, 256 * (number + 1))
            for view, side in zip(coder.views(memoryview(body)), stacked, strict=True):
                view.copy_(side[:, :, here])
            assert coder.likeliest(memoryview(body)) == number
            data = coder.encode(memoryview(body), number)
            back = bytearray(len(body))
            assert data is not None and coder.decode(
                memoryview(data), memoryview(back), 0, lay.layers
            )
            assert coder.loss(memoryview(body), memoryview(back), number) <= 1
            bits += 8 * coder.item_bytes * len(data) / len(body) / 4
            for name, view in zip(("keys", "values"), coder.views(memoryview(back)), strict=True):
                for one, layer in zip(own.layers, view, strict=True):
                    getattr(one, name)[0, :, here] = layer
        with torch.no_grad():
            got = model(ids[:, 4 * 256 :], past_key_values=own).logits[0]
        near = torch.nn.functional.kl_div(
            got.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="sum"
        )
        assert 0 < float(near) / len(got) < 0.04 and bits < 2


def test_bases_that_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, status, why in (
        (("--kl", "x"), 2, "Write kvt or kvt:kl=0.01"),
        (("--text", "none"), 2, "none cannot be read"),
        (("--model", "none", "--out", f"{tmp_path}/none/x"), 2, "none is no directory"),
        (("--kl", "1e-13"), 1, "no setting tried keeps"),
    ):
        found, said = told(tmp_path, capsys, *words)
        assert found == status and why in said
    assert not (tmp_path / "basis.kvt").exists()
