"""Several replicas on a real Ray, as docs/guides/ray.md has them."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.inside import ConfigError

from ..tiers.remote.servers_redis import redis_server

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'flowkv[ray]'"),
    pytest.mark.filterwarnings("default"),  # Ray warns of itself
]
ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "guides" / "ray.md").read_text()


@pytest.mark.timeout(600)
def test_the_guide_runs_and_loses_nothing(tmp_path: Path) -> None:
    """A replica is killed; all is answered, and what it knew is restored elsewhere."""
    program = tmp_path / "app.py"
    program.write_text(re.search(r"```python \{ .no-run \}\n(.*?)```", GUIDE, re.S)[1])
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with redis_server(tmp_path / "redis") as server:
        done = subprocess.run(
            [sys.executable, str(program)],
            env={**os.environ, "PYTHONPATH": path, "SHARED": server.uri},
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    said = re.findall(r"^(\d+) replica (\d+): (\d+) tokens reused$", done.stdout, re.M)
    assert [int(n) for n, *_ in said] == [*range(12)]
    assert len({replica for _, replica, _ in said}) <= 2
    for n in range(4, 12):  # even if news was late on a busy machine
        homes = {replica for m, replica, _ in said[:n] if int(m) % 4 == n % 4}
        assert said[n][1] in homes, f"a document goes where it is known:\n{done.stdout}"
        assert int(said[n][2]) > 600, done.stdout
    assert "answers: 12 of 12" in done.stdout, done.stdout
    # Half lie with the other replica; a busy machine may load the rest too late.
    reused = int(re.search(r"^reused: (\d+) of 12$", done.stdout, re.M)[1])
    assert reused >= 6, f"known documents were computed anew:\n{done.stdout}\n{done.stderr[-4000:]}"


class Handle:
    """A deployment whose replicas die so many times."""

    def __init__(self, deaths: int) -> None:
        self.deaths, self.calls = deaths, 0

    async def remote(self, prompt: list[int], **fields: Any) -> list[int]:
        from ray.exceptions import ActorDiedError

        self.calls += 1
        if self.calls <= self.deaths:
            raise ActorDiedError()
        return [*prompt, fields["more"]]


def test_ask_goes_on_elsewhere() -> None:
    ask = importlib.import_module("flowkv.connect.ray").ask  # which cannot be, without Ray
    handle = Handle(2)
    assert asyncio.run(ask(handle, [1], more=2)) == [1, 2] and handle.calls == 3
    from ray.exceptions import RayActorError

    with pytest.raises(RayActorError):
        asyncio.run(ask(Handle(9), [1], tries=2, more=2))
    with pytest.raises(ConfigError, match="Ask one replica"):
        asyncio.run(ask(handle, [1], tries=0, more=2))
