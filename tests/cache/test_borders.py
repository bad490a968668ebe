"""Refusals of meaningless arguments where they come in, by FlowKV's own errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowkv import KV, Config, FlowKVError
from tests.cache.toy import geometry
from tests.inside import ConfigError, StateError, StoreError, TokenError

META = torch.arange(40, device="meta")
IDS = list(range(40))
LONE = "\ud800"

CALLS: dict[str, tuple[type[FlowKVError], Callable[[KV], Any]]] = {
    "open meta": (TokenError, lambda kv: kv.open(META)),
    "explain meta": (TokenError, lambda kv: kv.explain(META)),
    "prefetch meta": (TokenError, lambda kv: kv.prefetch(META)),
    "forget meta": (TokenError, lambda kv: kv.forget(META)),
    "open sparse": (TokenError, lambda kv: kv.open(torch.arange(40).to_sparse())),
    "open bfloat16": (TokenError, lambda kv: kv.open(torch.arange(40).bfloat16())),
    "tenant number": (ConfigError, lambda kv: kv.open(IDS, tenant=5)),
    "tenant bytes": (ConfigError, lambda kv: kv.explain(IDS, tenant=b"\xff")),
    "tenant lone": (ConfigError, lambda kv: kv.forget(tenant=LONE)),
    "tenant warm": (ConfigError, lambda kv: kv.warm(IDS, tenant=5)),
    "keep number": (StoreError, lambda kv: kv.keep("a", {"x": 3})),
    "keep sparse": (StoreError, lambda kv: kv.keep("a", {"x": torch.eye(3).to_sparse()})),
    "keep meta": (StoreError, lambda kv: kv.keep("a", {"x": META})),
    "keep lone": (StoreError, lambda kv: kv.keep(LONE, {"x": torch.ones(2)})),
    "keep lone tensor": (StoreError, lambda kv: kv.keep("a", {LONE: torch.ones(2)})),
    "fetch lone": (StoreError, lambda kv: kv.fetch(LONE)),
    "prefill number": (StateError, lambda kv: list(kv.prefill([3]))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_meant_is_refused(name: str) -> None:
    error, call = CALLS[name]
    with KV(geometry(), gpu="1MiB", host="1MiB", namespace="t") as kv:
        with pytest.raises(error):
            call(kv)
        with kv.open(IDS) as seq:
            assert seq.length == 0


@pytest.mark.parametrize(
    "place",
    [
        *("redis://user:hunter2@[::1", "redis://user:hunter2\u2100@host"),
        *("redis:/user:hunter2@host", "S3:/user:hunter2@host:5GiB"),
        *("disk:redis://user:hunter2@host:5GiB", "host:redis://user:hunter2@host:5GiB"),
    ],
)
def test_a_uri_that_is_none_makes_no_directory_and_shows_no_password(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Config(tiers=("gpu:1MiB", place))
    assert "hunter2" not in str(caught.value) and not list(tmp_path.iterdir())


def test_a_directory_may_be_called_as_a_uri_begins() -> None:
    Config(tiers=("gpu:1MiB", "disk:./redis:/x:5GiB", "disk:/kv/s3://x:5GiB"))
