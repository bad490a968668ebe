"""Learned models of policies: they outlive the process, and residency does not travel with them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import xxhash

from flowkv import KV
from flowkv.policy import LRU, make_policy
from tests.cache.toy import make_kv, published, simple
from tests.inside import ConfigError, LoadGate, PolicyPlace, Warned, stack


class Learning(LRU):
    """Learns how often it was asked for something."""

    name = "learning"

    def __init__(self, fits: bool = True) -> None:
        super().__init__()
        self.model, self.fits = 0, fits

    def access(self, *arguments: Any) -> None:
        super().access(*arguments)
        self.model += 1

    def save_model(self) -> bytes:
        return str(self.model).encode()

    def load_model(self, saved: bytes) -> None:
        if not self.fits:
            raise ConfigError("a model of another kind", "Start without it")
        self.model = int(saved)


def models(kv: KV) -> list[int]:
    return [place.policy.model for place in kv.planner.store.places]


def disk_kv(directory: Path, **options: Any) -> KV:
    disk = f"{directory}:64MiB"
    return make_kv(simple(), pages=16, **{"policy": Learning, "disk": disk} | options)


def test_a_restarted_cache_begins_with_what_was_learned(tmp_path: Path) -> None:
    with disk_kv(tmp_path / "kv") as kv:
        for _ in range(3):
            published(kv, [1] * 25)
        assert models(kv) == [3, 3]
    file = tmp_path / "kv" / "learned"
    assert file.stat().st_size < 200 and file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["kv"]
    with disk_kv(tmp_path / "kv") as kv:
        assert models(kv) == [3, 3]
        published(kv, [2] * 25)
    with disk_kv(tmp_path / "kv") as kv:
        assert models(kv) == [4, 4]


def test_it_can_be_left_out_and_nothing_is_made_for_policies_that_do_not_learn(
    tmp_path: Path,
) -> None:
    with disk_kv(tmp_path / "a", learned=False) as kv:
        published(kv, [1] * 25)
    with disk_kv(tmp_path / "b", policy="lru") as kv:
        published(kv, [1] * 25)
    with make_kv(simple(), policy=Learning) as kv:
        published(kv, [1] * 25)
    assert not list(tmp_path.rglob("*learned*"))
    with disk_kv(tmp_path / "a") as kv:
        assert models(kv) == [0, 0]


def rewritten(version: int, models: dict[str, bytes]) -> bytes:
    body = msgspec.msgpack.encode({"version": version, "models": models})
    return xxhash.xxh3_128_digest(body) + body


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"something else", bytes(100), rewritten(2, {})),
        xxhash.xxh3_128_digest(b"\x93\x01") + b"\x93\x01",
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_said(tmp_path: Path, content: bytes) -> None:
    disk_kv(tmp_path / "kv", learned=False).close()
    (tmp_path / "kv" / "learned").write_bytes(content)
    with pytest.raises(ConfigError, match="Delete it"):
        stack.load(tmp_path / "kv", [], LoadGate())
    with disk_kv(tmp_path / "kv") as kv:
        assert models(kv) == [0, 0]
        assert kv.metrics.snapshot()['warnings_total{code="learned"}'] == 1
        published(kv, [1] * 25)
    with disk_kv(tmp_path / "kv") as kv:
        assert models(kv) == [1, 1]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    file, places = tmp_path / "learned", [PolicyPlace("disk", "disk", Learning())]
    stack.save(tmp_path, places, LoadGate())
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ConfigError):
            stack.load(tmp_path, places, LoadGate())
        file.write_bytes(whole[:at])
        with pytest.raises(ConfigError):
            stack.load(tmp_path, places, LoadGate())


def test_a_model_that_does_not_fit_is_ignored_and_said(tmp_path: Path) -> None:
    with disk_kv(tmp_path / "kv") as kv:
        published(kv, [1] * 25)
    said = []
    kv = disk_kv(tmp_path / "kv", policy=lambda: Learning(fits=False))
    assert models(kv) == [0, 0] and kv.metrics.snapshot()['warnings_total{code="learned"}'] == 1
    kv.bus.subscribe(said.append, Warned)
    (tmp_path / "kv" / "learned").unlink()
    (tmp_path / "kv" / "learned").mkdir()
    kv.close()  # it cannot be written, and everything else is closed all the same
    assert [event.code for event in said] == ["learned"] and kv.closed


def test_a_reader_leaves_it_as_it_is(tmp_path: Path) -> None:
    owner = disk_kv(tmp_path / "kv")
    published(owner, [1] * 25)
    owner.close()
    before = (tmp_path / "kv" / "learned").read_bytes()
    owner = disk_kv(tmp_path / "kv")
    with pytest.warns(UserWarning, match="another cache of this process"):
        reader = disk_kv(tmp_path / "kv")
    published(reader, [1] * 25)
    reader.close()
    assert (tmp_path / "kv" / "learned").read_bytes() == before


def test_models_belong_to_a_kind_of_place_and_a_policy(tmp_path: Path) -> None:
    gpu, first, second = (Learning() for _ in range(3))
    gpu.model, first.model, second.model = 1, 2, 3
    places = [
        PolicyPlace("cpu", "gpu", gpu),
        PolicyPlace("a", "disk", first),
        PolicyPlace("b", "disk", second),
    ]
    stack.save(tmp_path, [*places, PolicyPlace("h", "host", LRU())], LoadGate())
    fresh = [Learning(), Learning()]
    others = [PolicyPlace("z", "disk", fresh[0]), PolicyPlace("y", "host", fresh[1])]
    for directory in (tmp_path, tmp_path / "nothing"):
        stack.load(directory, others, LoadGate())
        assert [policy.model for policy in fresh] == [2, 0]


def test_the_learned_model_of_the_catalogue_travels(tmp_path: Path) -> None:
    places = [PolicyPlace("cpu", "gpu", make_policy("hazard"))]
    stack.save(tmp_path, places, LoadGate())
    assert (tmp_path / "learned").stat().st_size < 200_000
    fresh = make_policy("hazard")
    fresh.load_model = Mock(wraps=fresh.load_model)
    stack.load(tmp_path, [PolicyPlace("cpu", "gpu", fresh)], LoadGate())
    fresh.load_model.assert_called_once_with(places[0].policy.save_model())


def plant_pipe(file: Path, _elsewhere: Path) -> None:
    os.mkfifo(file)


def plant_directory(file: Path, _elsewhere: Path) -> None:
    file.mkdir()


def plant_socket(file: Path, _elsewhere: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(file.name)
    finally:
        os.chdir(here)


def plant_link(file: Path, elsewhere: Path) -> None:
    file.symlink_to(elsewhere)


def plant_file_of_another(file: Path, elsewhere: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    file.write_bytes(elsewhere.read_bytes())
    os.chown(file, 65534, 65534)


@pytest.mark.parametrize(
    "plant", [plant_pipe, plant_directory, plant_socket, plant_link, plant_file_of_another]
)
@pytest.mark.parametrize("inside", [True, False])
def test_what_somebody_planted_is_not_read(
    tmp_path: Path, plant: Callable[[Path, Path], None], inside: bool
) -> None:
    """A pipe of that name once hung the cache for ever, and anybody could have made it."""
    with disk_kv(tmp_path / "other") as kv:
        published(kv, [1] * 25)
    model = tmp_path / "other" / "learned"
    before = model.read_bytes()
    disk_kv(tmp_path / "kv", learned=False).close()
    file = tmp_path / "kv" / "learned" if inside else tmp_path / "kv.learned"
    plant(file, model)
    with disk_kv(tmp_path / "kv") as kv:  # beside it there is nothing for us, whatever it is
        assert models(kv) == [0, 0]
        assert kv.metrics.snapshot().get('warnings_total{code="learned"}', 0) == int(inside)
        published(kv, [1] * 25)
    assert model.read_bytes() == before
    if file.is_file() and inside:
        assert not file.is_symlink() and file.stat().st_uid == os.geteuid()


def test_a_directory_is_the_same_after_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kv = disk_kv(Path("kv"))
    published(kv, [1] * 25)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    kv.close()
    assert (tmp_path / "kv" / "learned").is_file() and not list(Path().iterdir())
