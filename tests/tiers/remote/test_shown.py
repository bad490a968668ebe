"""Names of remote tiers and their errors show no password, wherever it stands in the URI."""

from __future__ import annotations

import traceback
import warnings

import pytest

from flowkv import FlowKVError
from flowkv.tiers import open_tier

SECRETIVE = [
    "redis://alice:hunter2@127.0.0.1:1/0",
    "redis://:hunter2@127.0.0.1:1?health_check_interval=hunter2",
    *("redis://alice:hunter2/x@127.0.0.1:1", "redis://alice:x/hunter2@127.0.0.1:1"),
    "redis://alice:hunter2?ttl_s=5@127.0.0.1:1",
    *("redis://127.0.0.1:1?socket_connect_timeout=hunter2", "unix://alice:hunter2@/nowhere.sock"),
    *("s3://key:hunter2@bucket/kv", "s3://bucket/kv?secret_access_key=hunter2"),
    *("s3://key:x/hunter2@bucket/kv", "az://hunter2@account/kv?sig=hunter2"),
    *("mooncake://alice:hunter2@:50051", "mooncake://alice:x/hunter2@master:50051"),
    *("mooncake://alice:hunter2", "mooncake://master:50051?hunter2"),
]


@pytest.mark.parametrize("uri", SECRETIVE)
def test_no_name_and_no_error_shows_a_secret(uri: str) -> None:
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            tier = open_tier(uri.partition(":")[0], path=uri, capacity_bytes=1 << 20)
        said = f"{tier.name} {tier!r} {[str(one.message) for one in warned]}"
        tier.close()
    except FlowKVError as error:
        said = "".join(traceback.format_exception(error)) + repr(error)
    said = "\n".join(line for line in said.splitlines() if "hunter2" in line)
    assert not said, said
