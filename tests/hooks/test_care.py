"""Facts that a call tells about its conversation: they reach the policies, once per request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flowkv
from flowkv import Retain
from flowkv.policy import LRU, Lease
from tests.hooks import models
from tests.hooks.compare import attached, generate
from tests.inside import restore
from tests.policy.call_log import logged_by


def test_a_call_says_what_becomes_of_its_pages() -> None:
    model, logs = models.causal("llama"), []
    ids = models.prompt(40)
    with attached(model, policy=logged_by(logs, LRU)) as kv:
        care: dict[str, Any] = {"session": "s", "retain": [Retain(0, 16, priority=90)]}
        cache = kv.cache(input_ids=ids, lease="one_shot", **care)
        generate(model, 4, input_ids=ids, past_key_values=cache)
        del cache
        assert kv.hint("s", flowkv.NEVER) >= 32
        leases = {
            slot: call.options["lease"]
            for call in logs[0].calls
            if call.name == "insert"
            for slot in call.arguments[1]
        }
        assert leases[0] == Lease(rank=90) and leases[max(leases)] == "one_shot"


def test_rows_that_are_opened_twice_are_one_request_each(monkeypatch: pytest.MonkeyPatch) -> None:
    model, logs = models.causal("llama"), []
    one, other = models.prompt(48, seed=1), models.prompt(48, seed=2)
    with attached(model, policy=logged_by(logs, LRU)):
        generate(model, 2, input_ids=one)
        generate(model, 2, input_ids=other[:, :16])
        before = len([call for call in logs[0].calls if call.name == "access"])
        # One row is known further than the other, and suppose that it cannot be cut.
        monkeypatch.setattr(restore, "_align", lambda *_: False)
        generate(model, 2, input_ids=torch.cat([one, other]))
        visits = [call for call in logs[0].calls if call.name == "access"][before:]
        requests = [call.arguments[2].request for call in visits]
        assert len(requests) == len(set(requests)) == 2
        ended = [call.arguments[1] for call in logs[0].calls if call.name == "complete"]
        assert sorted(ended)[-2:] == sorted(requests) and len(ended) == len(set(ended))
