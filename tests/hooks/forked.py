"""Processes that attach a model and fork: `python -m tests.hooks.forked DIRECTORY CASE...`.

Each case is a child of a process that has imported what all need, and has started no thread: a
child of the tests' process would wait for threads that torch had there.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import flowkv
from tests.clock import held
from tests.hooks import models
from tests.hooks.compare import generate
from tests.inside import PagedCache

warnings.simplefilter("ignore", DeprecationWarning)


def answer(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return generate(model, 12, input_ids=ids, **options).sequences


def in_child(work: Callable[[], None]) -> None:
    """Runs `work` in a child that ends as any Python process does, and fails with it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        try:
            work()
        except Exception:
            traceback.print_exc()
            os._exit(1)
        sys.exit(0)  # finalizers and all
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"


def run(case: str, directory: Path) -> None:
    torch.set_num_threads(2 if case == "threaded" else 1)
    ids, longer = models.prompt(60), models.prompt(80)
    model = models.causal("falcon_h1" if case == "hybrid" else "llama")
    theirs, beyond = answer(model, ids), answer(model, longer)
    own = DynamicCache(config=model.config)
    answer(model, ids, past_key_values=own)
    tail = torch.cat([theirs, models.prompt(5, seed=3)], 1)
    further = answer(model, tail, past_key_values=own)
    options = dict(gpu="8MiB", page_size=16, host="8MiB", disk=f"{directory / 'kv'}:1GiB")
    kv = flowkv.attach(model, **options)
    made = generate(model, 12, input_ids=ids)
    past: Any = made.past_key_values
    assert isinstance(past, PagedCache)
    assert torch.equal(made.sequences, theirs)
    files = sorted(str(path) for path in directory.rglob("*"))

    def generates() -> None:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                assert torch.equal(answer(model, ids), theirs)
        assert [str(w.message)[:6] for w in warned if "parent" in str(w.message)] == ["FlowKV"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = kv.cache(input_ids=longer)
            assert torch.equal(answer(model, longer, past_key_values=cache), beyond)
        assert kv.stats()["tokens_reused"] == 0
        assert kv.flush() is False

    def goes_on() -> None:
        """A cache that the parent filled is the child's own, each copy of it, too."""
        twin = copy.deepcopy(past)
        for cache in (past, twin):
            assert cache.layers[0].keys.shape[2] == theirs.shape[1] - 1
            assert torch.equal(answer(model, tail, past_key_values=cache), further)
            assert type(cache) is DynamicCache

    def lets_go() -> None:
        nonlocal past
        past = made.past_key_values = None
        gc.collect()
        kv.detach()
        kv.close()
        assert not model._forward_pre_hooks
        assert torch.equal(answer(model, ids), theirs)

    def attaches() -> None:
        """The parent's directory is read, not written."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine = flowkv.attach(model, **options)
        assert torch.equal(answer(model, ids), theirs)
        tier = mine.stats()["tiers"]
        assert [one["writable"] for one in tier.values() if one["kind"] == "disk"] == [False]
        mine.close()

    if case == "locked":

        def refuses() -> None:
            generates()
            try:
                past.crop(-1)
            except flowkv.core.errors.StateError as error:
                assert "forked" in str(error)
            else:
                raise AssertionError("it was read in the middle of a change")
            kv.close()

        with held(kv.lock):
            in_child(refuses)
    elif case == "attaches":
        assert kv.flush()
        in_child(attaches)
    else:
        in_child(generates)
        in_child(goes_on)
        in_child(lets_go)
    assert set(files) <= {str(path) for path in directory.rglob("*")}
    assert torch.equal(answer(model, tail, past_key_values=past), further)
    assert torch.equal(answer(model, ids), theirs)
    assert case == "hybrid" or kv.stats()["tokens_reused"] >= 48
    kv.close()
    print(case)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        place = Path(sys.argv[1], name)
        place.mkdir()
        in_child(functools.partial(run, name, place))
