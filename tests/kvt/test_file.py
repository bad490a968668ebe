"""Files of bases: all of one, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.inside import BasisFile, ConfigError, basis_digest, open_basis, page_layout, save_basis
from tests.kvt.pages import SIZE, Source, group, layout, learner

CODER = learner(Source(layout())).coder(3e-3, {"kl": 0.25})
FILE = BasisFile("org/model", group(), SIZE, CODER.data)


def test_a_basis_comes_back(tmp_path: Path) -> None:
    save_basis(tmp_path / "a.kvt", FILE)
    found = open_basis(tmp_path / "a.kvt")
    assert found.coder.data == CODER.data and found.coder.layout == layout()
    assert str(found) == f"the basis {tmp_path / 'a.kvt'} of org/model"
    assert [one.name for one in tmp_path.iterdir()] == ["a.kvt"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.one_of(st.integers(0, 80), st.integers(0, 1 << 20)), bit=st.integers(0, 7))
def test_damaged_files_are_refused(tmp_path: Path, at: int, bit: int) -> None:
    path = tmp_path / "a.kvt"
    save_basis(path, FILE)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    for spoilt in (data, data[: at % len(data)]):
        path.write_bytes(spoilt)
        with pytest.raises(ConfigError, match="flowkv calibrate"):
            open_basis(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"page_size": SIZE * 2}, {"group": group("bfloat16")}, {"group": group(layers=(0, 1))}),
        *({"group": group(kv_heads=1)}, {"data": CODER.data[:-1]}, {"page_size": "64"}),
        {"more": 1},
    ],
)
def test_files_with_other_contents_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    save_basis(path := tmp_path / "a.kvt", FILE)
    start = path.read_bytes().partition(b"\n")[0] + b"\n"
    body = msgspec.msgpack.encode(msgspec.to_builtins(FILE) | {"data": FILE.data} | change)
    path.write_bytes(start + basis_digest(body) + body)
    with pytest.raises(ConfigError, match="holds no basis"):
        open_basis(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"page_size": size} for size in (0, -SIZE, 2, 512, 10**12)),
        {"group": group("float64")},
        {"group": group(kind="keys", value_dim=0)},
        {"group": group(kind="latent", kv_heads=1)},
    ],
    ids=str,
)
def test_bases_of_pages_that_cannot_be_coded_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """Even if all digests and fingerprints are right."""
    found = msgspec.structs.replace(FILE, **change)
    inside = msgspec.msgpack.decode(FILE.data)
    inside["layout"] = page_layout(found.group, found.page_size).fingerprint()
    found = msgspec.structs.replace(found, data=msgspec.msgpack.encode(inside))
    save_basis(path := tmp_path / "a.kvt", found)
    with pytest.raises(ConfigError, match="holds no basis"):
        open_basis(path)


def test_paths_that_lead_to_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*flowkv calibrate"):
        open_basis(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_basis(tmp_path / "none" / "a.kvt", FILE)
