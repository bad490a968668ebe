"""Opening of tiers: the class that a place becomes, and the message when it cannot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flowkv.tiers import REMOTE_KINDS, Envelope, open_tier
from flowkv.tiers.disk import DiskTier
from flowkv.tiers.shared import SharedTier
from tests.cache.toy import make_kv
from tests.inside import (
    ConfigError,
    HostTier,
    MissingDependencyError,
    ObjectTier,
    StoreError,
    core_digest,
)

MIB = 1 << 20
EXTRAS = {
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "mooncake": "mooncake",
    "nixl": "nixl",
    "unix": "redis",
}


def test_a_host_tier_with_a_path_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Shared:
        def __init__(self, name: str, capacity_bytes: int, clock: object) -> None:
            made.append((name, capacity_bytes))

    monkeypatch.setattr("flowkv.tiers.shared.SharedTier", Shared)
    open_tier("host", path="pool", capacity_bytes=MIB)
    assert made == [("pool", MIB)]
    own = open_tier("host", capacity_bytes=MIB)
    assert (own.name, own.kind, own.shared) == ("host", "host", False)


def test_a_disk_tier_gets_the_envelope(tmp_path: Path) -> None:
    envelope = Envelope()
    tier = open_tier("disk", path=str(tmp_path), capacity_bytes=MIB, envelope=envelope)
    assert (tier.kind, tier.capacity_bytes) == ("disk", MIB)


@pytest.mark.parametrize("kind", ["host", "shared", "disk", "object"])
def test_tiers_digest_by_compiled_code(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a program makes itself: numpy takes thirty times as long."""
    monkeypatch.setattr(core_digest, "compiled", None)
    match kind:
        case "host":
            HostTier(MIB).close()
        case "shared":
            SharedTier("digest", MIB, directory=tmp_path).close()
        case "disk":
            DiskTier(tmp_path, MIB).close()
        case _:
            ObjectTier(f"file://{tmp_path}").close()
    assert core_digest.compiled is not None


@pytest.mark.parametrize("name", [b"a\xffb", b"a\nb", b"%41 #"])
def test_odd_names_of_directories(tmp_path: Path, name: bytes) -> None:
    """The tier's name goes into metrics and traces, which are UTF-8."""
    place = os.path.join(os.fsencode(tmp_path), name)
    tier = open_tier("disk", path=os.fsdecode(place), capacity_bytes=MIB)
    assert os.path.exists(os.path.join(place, b"journal"))
    assert b"a" in tier.name.encode() or b"%41" in tier.name.encode()


def test_a_name_too_long_for_a_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="File name too long"):
        make_kv(tiers=[f"disk:{tmp_path / ('n' * 256)}:8MiB"])


@pytest.mark.parametrize("kind", REMOTE_KINDS)
def test_remote_tiers_name_their_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not there: the sentence says what to install."""
    extra = EXTRAS.get(kind.removesuffix("s") if kind == "valkeys" else kind, "object")
    library = {"object": "obstore"}.get(extra, extra)
    for module in [m for m in sys.modules if m.partition(".")[0] == library]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, library, None)
    for module in [m for m in sys.modules if m.startswith("flowkv.tiers.remote.")]:
        parent, _, name = module.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], name, sys.modules[module])  # what is undone later
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(MissingDependencyError, match=rf"flowkv\[{extra}\]"):
        open_tier(kind, path=f"{kind}://localhost:1/kv")


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'floppy' is unknown.*s3"):
        open_tier("floppy", capacity_bytes=MIB)
