"""`flowkv.memo`: what was computed is answered by content; nothing else ever is."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

import flowkv
from flowkv.connect import Keeper
from flowkv.policy import make_policy
from flowkv.testing import FlakyTier
from tests import interrupts
from tests.clock import held, in_child, together, without_threads
from tests.conftest import of_torch
from tests.hooks.tabled import as_library
from tests.inside import (
    Bus,
    ConfigError,
    Faults,
    HostTier,
    ManualClock,
    Remembered,
    StateError,
    UnsupportedModelError,
)

WIDTH = 6


COMPUTED: list[int] = []
"""Rows of each computation."""


def _tally() -> Any:
    """Count rows in what passes for a function of torch's, so that no model is foreign by it.

    Libraries' loggers are in no name; a list would be, with its content.
    """
    log, handler = logging.Logger("counted"), logging.Handler()
    handler.emit = lambda record: COMPUTED.append(record.args[0])  # type: ignore
    log.addHandler(handler)

    def count(rows: int) -> None:
        log.error("%d rows", rows)

    return of_torch(count)


LOG = _tally()


LIBRARY = as_library("transformers.models.counted")
LIBRARY.COUNT = LOG
Encoder = functools.partial(LIBRARY.Encoder, width=WIDTH)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loads take longer than computing next to nothing, and a machine may be busy."""
    monkeypatch.setattr(Keeper, "worth", lambda *_: True)
    monkeypatch.setattr("flowkv.tensors.memo._LEAST_S", 5.0)
    COMPUTED.clear()
    yield
    COMPUTED.clear()


def rows(*seeds: int) -> torch.Tensor:
    each = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(each)


def remember(function: Any, **options: Any) -> Any:
    return flowkv.memo(function, **{"places": "host:8MiB", **options})


def keeper_over(tier: Any) -> Keeper:
    """A keeper whose policy needs no compiler."""
    return Keeper([tier], lambda kind, capacity_bytes: make_policy("lru"))


# ---- what is answered


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_any_batches_give_what_rows_give_and_each_row_is_computed_once(
    batches: list[tuple[list[int], bool]],
) -> None:
    encoder, seen = Encoder(), set[int]()
    with remember(encoder) as remembered:
        for seeds, waits in batches:
            COMPUTED.clear()
            given_rows = rows(*seeds)
            found = remembered(given_rows)
            fresh, computed = set(seeds) - seen, list(COMPUTED)
            seen |= fresh
            assert torch.equal(found, encoder(given_rows))
            assert computed == ([len(fresh)] if fresh else [])
            found.fill_(7.0)  # of no consequence to anybody else
            if waits:
                assert remembered.flush()


def test_masks_belong_to_their_rows() -> None:
    with remember(Encoder()) as remembered:
        x = rows(1, 1, 2)
        found = remembered(x, mask=torch.tensor([1.0, 0.0, 1.0]))
        assert COMPUTED == [3]
        assert not found[1].any()
        assert found[0].any()
        again = remembered(x.flip(0), torch.tensor([1.0, 0.0, 1.0]))
        assert COMPUTED == [3]
        assert torch.equal(again, found.flip(0))


def test_dtypes_shapes_and_other_arguments_are_in_the_name() -> None:
    def scaled(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        LOG(len(x))
        return x * by

    with remember(scaled, key="scaled") as remembered:
        x = torch.zeros(2, 4)
        for call in (
            *(lambda: remembered(x), lambda: remembered(x, 2.0), lambda: remembered(x, by=3.0)),
            *(lambda: remembered(x.double()), lambda: remembered(x.view(torch.int32), 2.0)),
            lambda: remembered(torch.zeros(2, 2, 2)),
            lambda: remembered(torch.zeros(2, 8, dtype=torch.float16)),
        ):
            expected = len(COMPUTED) + 1
            first = call()
            assert len(COMPUTED) == expected
            again = call()
            assert len(COMPUTED) == expected
            assert torch.equal(first, again)
            assert (first.dtype, first.shape) == (again.dtype, again.shape)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Output:
    last: torch.Tensor
    states: tuple[torch.Tensor, ...] | None = None
    pooled: torch.Tensor | None = None


@pytest.mark.parametrize(
    "make",
    [
        *(lambda x: (x, x.sum(1)), lambda x: (x, (x > 0))),
        *(lambda x: {"a": x.bfloat16(), "b": {"c": x[:, :0]}}, lambda x: Pair(x, x.long())),
        *(lambda x: Output(x, (x, x + 1)), lambda x: x.numpy() * 2),
        lambda x: torch.complex(x, x).conj(),
    ],
    ids=["tuple", "bools", "dict", "named tuple", "dataclass", "array", "conjugate"],
)
def test_results_of_every_kind_come_back(make: Callable[[torch.Tensor], Any]) -> None:
    x = rows(1, 2, 3)
    with remember(make, key="made") as remembered:
        remembered(x[:2])
        assert remembered.flush()
        found, expected = remembered(x), make(x)
    assert remembered.stats()["found"] == 2
    assert type(found) is type(expected)
    assert_same(found, expected)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert np.array_equal(found, expected)
        assert found.dtype == expected.dtype
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, Output):
        assert_same(vars(found), vars(expected))
    elif expected is None:
        assert found is None
    else:
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def test_texts_are_rows() -> None:
    def embed(texts: list[str]) -> np.ndarray[Any, Any]:
        LOG(len(texts))
        return np.array([[len(text), ord(text[0])] for text in texts], np.float32)

    with remember(embed, key="embed") as remembered:  # numpy's functions are in no name
        first = remembered(["one", "three", "one"])
        assert COMPUTED == [2]
        assert first.tolist() == [[3, 111], [5, 116], [3, 111]]
        assert remembered(["six", "three"]).tolist() == [[3, 115], [5, 116]]
        assert COMPUTED == [2, 1]


def _boxes(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.full((2, 1), float(row.sum())) for row in x]


@pytest.mark.parametrize(
    ("function", "first", "then"),
    [
        (
            lambda pairs: torch.tensor([[ord(a), ord(b)] for a, b in pairs]),
            ([["q", "a"], ["q", "b"]],),
            ([["q", "c"], ["q", "d"]],),
        ),
        (
            lambda images: torch.stack([image.sum()[None] for image in images]),
            ([torch.eye(2), torch.ones(2, 2)],),
            ([torch.tensor([[1.0, 0], [1, 1]]), torch.tensor([[0.0, 1], [1, 1]])],),
        ),
        (
            lambda x, lengths: x[:, :1] * torch.tensor(lengths)[:, None],
            (torch.eye(2), [3, 5]),
            (torch.eye(2).flip(0), [3, 5]),
        ),
        (
            lambda x, sizes: x[:, :1] * torch.tensor(sizes)[:, None],
            (torch.eye(2), (3, 5)),
            (torch.eye(2).flip(0), (3, 5)),
        ),
        (_boxes, (torch.eye(2),), (torch.eye(2)[:1],)),
    ],
    ids=["pairs", "images", "numbers", "sizes", "boxes"],
)
def test_lists_that_may_hold_one_item_for_each_row_mix_no_rows(
    function: Callable[..., Any], first: Any, then: Any
) -> None:
    with remember(function, key="lists") as remembered:
        if function is _boxes:
            with pytest.raises(UnsupportedModelError, match="lists"):
                remembered(*first)
            return
        for given in (first, then, first):
            assert torch.equal(remembered(*given), function(*given))
        assert remembered.stats()["declined"] == {"lists": 3}


def test_the_order_of_collected_names_is_in_the_name() -> None:
    def stacked(**parts: torch.Tensor) -> torch.Tensor:
        return torch.stack([*parts.values()], 1)

    a, b = rows(1, 2), rows(3, 4)
    with remember(stacked, key="stacked") as remembered:
        for parts in ({"a": a, "b": b}, {"b": b, "a": a}, {"b": b[:1], "a": a[:1]}):
            assert torch.equal(remembered(**parts), stacked(**parts))
        assert remembered.stats()["found"] == 1


def test_a_whole_call_may_be_one_row() -> None:
    def total(x: torch.Tensor, marks: Any = ()) -> tuple[torch.Tensor, int]:
        LOG(len(x))
        return x.sum(), len(x)

    with remember(total, batch=False, key="total") as remembered:
        for x in (rows(1, 2), rows(1), rows(1, 2)):
            found, count = remembered(x, [])
            assert torch.equal(found, x.sum())
            assert count == len(x)
        assert COMPUTED == [2, 1]


def test_rows_longer_than_what_is_asked_for_first() -> None:
    def wide(x: torch.Tensor) -> torch.Tensor:
        LOG(len(x))
        return x[:, :1] * torch.arange(50_001)

    x = rows(1, 2)
    keeper = keeper_over(HostTier(8 << 20))
    with remember(wide, places=keeper, key="wide") as remembered:
        first = remembered(x)
        assert remembered.flush()
    with remember(
        wide, places=keeper, key="wide"
    ) as another:  # which does not know how long they are
        assert torch.equal(another(x), first)
    assert COMPUTED == [2]
    keeper.close()


def test_rows_of_other_lengths_are_computed_together() -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        return x[:, : int(x.max())]

    one, two = torch.tensor([[1, 1, 1]]), torch.tensor([[2, 2, 2]])
    with remember(padded, key="padded") as remembered:
        remembered(one)
        remembered(two)
        both = torch.cat([one, two])
        assert torch.equal(remembered(both), padded(both))
        both = torch.cat([one, torch.tensor([[3, 3, 3]])])
        assert torch.equal(remembered(both), padded(both))


@dataclass
class Doubled:
    """A result that cannot be made of its fields: it doubles them."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x * 2


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_results_of_classes_with_code_are_only_computed(seeds: tuple[int, int]) -> None:
    def doubled(x: torch.Tensor) -> Doubled:
        return Doubled(x)

    with remember(doubled, key="doubled") as remembered:
        assert torch.equal(remembered(rows(1)).x, rows(1) * 2)
        for _ in range(2):
            assert torch.equal(remembered(rows(*seeds)).x, rows(*seeds) * 2)
        assert remembered.stats()["declined"] == {"class": 3}
        assert remembered.flush()
        assert remembered.stats()["tiers"]["host"]["frames"] == 0


def test_no_texts_are_no_rows() -> None:
    with remember(lambda texts: np.zeros((len(texts), 2)), key="none") as remembered:
        assert remembered([]).shape == (0, 2)
        assert remembered(()).shape == (0, 2)
        with pytest.raises(ConfigError, match="rows"):
            remembered(3)


def test_interrupts_anywhere_leave_no_row_in_the_queue() -> None:
    encoder, fresh, only = Encoder(), iter(range(100_000)), {"only": ("tensors/write_behind",)}
    with remember(encoder) as remembered, interrupts.collectable():

        def look() -> None:
            x = rows(next(fresh), 100_000)
            assert torch.equal(remembered(x), encoder(x))

        look()
        for at in range(1, interrupts.places(look, **only) + 1):
            interrupts.run(look, interrupts.Tracer(at, **only))
            assert interrupts.free(remembered._rows._changed)
            assert remembered._rows.flush(5.0) and not remembered._rows.pending_bytes
            look()


def test_rows_are_computed_where_the_system_has_no_thread() -> None:
    encoder, x = Encoder(), rows(1, 2)
    with remember(encoder) as remembered:
        with without_threads():
            assert torch.equal(remembered(x), encoder(x))
        assert remembered.stats()["dropped"] == 2
        assert torch.equal(remembered(x), encoder(x))
        assert remembered.flush()
        assert remembered.stats()["found"] == 0
        assert torch.equal(remembered(x), encoder(x))
        assert remembered.stats()["found"] == 2


def test_functions_that_move_their_inputs_obey_autocast_there() -> None:
    def moves(x: torch.Tensor) -> torch.Tensor:  # to a GPU, which casts
        return x * (2 if torch.is_autocast_enabled("cuda") else 1)

    with remember(moves, key="moves") as remembered:
        remembered(rows(1))
        torch.set_autocast_enabled("cuda", True)
        try:
            assert torch.equal(remembered(rows(1)), rows(1) * 2)
        finally:
            torch.set_autocast_enabled("cuda", False)
        assert torch.equal(remembered(rows(1)), rows(1))
        assert remembered.stats()["found"] == 1


# ---- what is not


def test_a_changed_module_computes_anew() -> None:
    encoder, x = Encoder(), rows(1, 2)
    with remember(encoder) as remembered:

        def check(*, computes: bool) -> None:
            COMPUTED.clear()
            found = remembered(x)
            assert bool(COMPUTED) == computes
            assert torch.equal(found, encoder(x))
            assert remembered.flush()

        check(computes=True)
        check(computes=False)
        with torch.no_grad():
            encoder.weight.mul_(2)
        check(computes=True)
        encoder.weight.data.mul_(2)  # which nobody counts
        check(computes=True)
        encoder.scale = 3.0
        check(computes=True)
        handle = encoder.register_forward_hook(lambda module, args, output: output + 1)
        check(computes=True)
        handle.remove()
        check(computes=False)  # it is again what it was
        encoder.scale = 2.0
        check(computes=False)


def test_weights_written_while_rows_wait_are_not_stored_under_the_old_name() -> None:
    encoder, x = Encoder(), rows(1, 2)
    keeper = keeper_over(HostTier(8 << 20))
    held = threading.Event()
    with remember(encoder, places=keeper) as remembered:
        proven = remembered._rows._proven
        remembered._rows._proven = lambda name: held.wait(10) and proven(name)
        remembered(x)
        before = encoder.weight.clone()
        encoder.weight.data.mul_(2)
        held.set()
        assert remembered.flush()
        encoder.weight.data.copy_(before)
    assert keeper.report()["tiers"]["host"]["frames"] == 0
    keeper.close()


def test_what_cannot_be_stored_is_computed_again() -> None:
    def fails(name: bytes) -> bool:
        raise RuntimeError(name)

    with remember(Encoder()) as remembered:
        remembered._rows._proven = fails
        for calls in (1, 2):
            remembered(rows(1))
            assert [1] * calls == COMPUTED
            assert remembered.flush()
        assert remembered.stats()["pending_bytes"] == 0


def test_training_gradients_and_chance_are_only_computed() -> None:
    encoder, x = Encoder(), rows(1, 2)
    with remember(encoder) as remembered:
        encoder.train()
        remembered(x)
        encoder.eval()
        encoder.weight.requires_grad_(True)
        assert remembered(x).requires_grad
        with torch.no_grad():
            remembered(x)
            remembered(x)
        assert remembered(x).requires_grad
        assert remembered(x.clone().requires_grad_()).requires_grad
        assert COMPUTED == [2, 2, 2, 2, 2]
        assert remembered.stats()["declined"] == {"training": 1, "gradients": 3}

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(len(x), 1)

    with remember(noisy, key="noisy") as remembered:
        assert not torch.equal(remembered(x), remembered(x))
        found = remembered(rows(1, 1))
        assert not torch.equal(found[0], found[1])


def test_gradients_through_a_function_with_a_key_are_not_lost() -> None:
    layer, x = torch.nn.Linear(WIDTH, 2), rows(1, 2)
    with remember(lambda x: layer(x) * 1, key="layer") as remembered:
        with torch.no_grad():
            remembered(x)
            assert remembered.flush()
        assert remembered(x).requires_grad
        with torch.no_grad():
            remembered(x)
        assert remembered.stats()["found"] == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch itself
def test_derivatives_and_compiled_calls_are_those_of_the_function() -> None:
    encoder, x = torch.nn.Linear(WIDTH, 2).eval().requires_grad_(False), rows(1, 2)
    with remember(encoder) as remembered:
        remembered(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            found, expected = (
                forward_ad.unpack_dual(f(dual)).tangent for f in (remembered, encoder)
            )
        assert torch.equal(found, expected)
        assert torch.equal(torch.vmap(remembered)(x[:, None]), encoder(x[:, None]))
        compiled = torch.compile(lambda x: remembered(x) + 1, backend="eager")
        for y in (x, rows(3, 4), x):
            assert torch.equal(compiled(y), encoder(y) + 1)


@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)])
def test_what_writes_to_its_inputs_does_so_each_time(seeds: tuple[int, int]) -> None:
    with remember(lambda x: x.relu_() * 2, key="writes") as remembered:
        for _ in range(2):
            x = -rows(*seeds)
            assert torch.equal(remembered(x), x * 2)
            assert torch.equal(x, (-rows(*seeds)).relu())
        assert remembered.stats()["declined"] == {"writes to inputs": 2}


def _double(x: Any) -> Any:
    x *= 2
    return x + 1


def _note(x: dict[str, torch.Tensor]) -> torch.Tensor:
    x["seen"] = x["x"] > 0
    return x["x"] + 1


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (_double, lambda: np.ones((2, WIDTH), np.float32)),
        (_double, torch.inference_mode()(lambda: torch.ones(2, WIDTH))),
        (_note, lambda: {"x": torch.ones(2, WIDTH)}),
    ],
    ids=["array", "inference", "dict"],
)
def test_so_does_what_writes_to_inputs_without_versions(
    function: Callable[[Any], Any], make: Callable[[], Any]
) -> None:
    with torch.inference_mode(), remember(function, key="writes") as remembered:
        for _ in range(2):
            x, plain = make(), make()
            assert torch.equal(*map(torch.as_tensor, (remembered(x), function(plain))))
            assert str(x) == str(plain)


def test_what_cannot_be_named_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="key="):
        remember(lambda x: x)
    with (
        remember(lambda x: x, key="same") as remembered,
        pytest.raises(UnsupportedModelError, match="an input"),
    ):
        remembered(object())
    with pytest.raises(ConfigError, match="of host, disk or remote"):
        flowkv.memo(Encoder(), places="gpu:16MiB")
    with remember(Encoder()) as remembered, pytest.raises(ConfigError, match="batch="):
        remembered(rows(1, 2), mask=torch.ones(3))
    with (
        remember(lambda x: x.sum(0), key="sum") as remembered,
        pytest.raises(UnsupportedModelError, match="batch=False"),
    ):
        remembered(rows(1, 2))
    with pytest.raises(ConfigError, match="ttl"):
        remember(Encoder(), ttl=-1)


def test_a_key_may_change_with_each_call() -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        LOG(len(x))
        return x + 3.0

    x, versions = rows(1, 2), iter(["1", "1", "2"])
    with remember(shifted, key=lambda: next(versions)) as remembered:
        for calls in (1, 1, 2):
            assert torch.equal(remembered(x), x + 3.0)
            assert len(COMPUTED) == calls


def test_other_names_of_batched_arguments() -> None:
    def against(x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        LOG(len(x))
        return x @ classes.T

    classes = rows(7, 8)
    with remember(against, batch=("x",), key="against") as remembered:
        for seeds in ((1, 2), (2, 3, 4)):
            x = rows(*seeds)
            assert torch.allclose(remembered(x, classes), x @ classes.T)
        assert COMPUTED == [2, 2]
        remembered(rows(1, 2), classes=rows(8, 7))
        assert COMPUTED == [2, 2, 2]


def test_names_need_no_transformers_and_are_the_same_beside_it() -> None:
    program = """
import sys, torch, flowkv
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
with torch.no_grad():
    for tensor in net.parameters():
        tensor.fill_(0.5)
print(flowkv.memo(net, places="host:1MiB")._name().hex(), "transformers" in sys.modules)
"""
    found = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", first + program],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for first in ("", "import transformers")
    ]
    assert found[0][0] == found[1][0]
    assert [loaded for _, loaded in found] == ["False", "True"]


# ---- places


def test_a_restart_finds_all_on_a_disk(tmp_path: Path) -> None:
    x, places = rows(1, 2, 3), ["host:1MiB", f"disk:{tmp_path}/memo:16MiB"]
    with remember(Encoder(), places=places) as remembered:
        first = remembered(x)
    with remember(Encoder(), places=places) as remembered:
        assert torch.equal(remembered(x), first)
        assert COMPUTED == [3]
    with remember(Encoder(seed=1), places=places) as remembered:
        remembered(x)
        assert COMPUTED == [3, 3]


def test_flipped_bytes_are_computed_again(tmp_path: Path) -> None:
    x, places = rows(1, 2, 3), f"disk:{tmp_path}/memo:16MiB"
    with remember(Encoder(), places=places) as remembered:
        first = remembered(x)
    needle = first[0].numpy().tobytes()
    flipped = 0
    for path in (tmp_path / "memo").rglob("*"):
        if path.is_file() and (at := (data := bytearray(path.read_bytes())).find(needle)) >= 0:
            data[at] ^= 1
            path.write_bytes(data)
            flipped += 1
    assert flipped == 1
    for expected in ([3, 1], [3, 1]):
        with remember(Encoder(), places=places) as remembered:
            assert torch.equal(remembered(x), first)
            assert expected == COMPUTED


def test_a_class_that_is_gone_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, x = f"disk:{tmp_path}/memo:16MiB", rows(1, 2)
    with remember(Output, key="gone", places=places) as remembered:
        remembered(x)
    monkeypatch.delattr(f"{__name__}.Output")
    with remember(lambda x: x * 2, key="gone", places=places) as remembered:
        assert torch.equal(remembered(x), x * 2)


def test_a_call_that_began_before_forget_stores_nothing_behind_it() -> None:
    begun, held = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        LOG(len(x))
        begun.set()
        held.wait(10)
        return x * 1.0

    with remember(slow, key="slow") as remembered:
        thread = threading.Thread(target=remembered, args=(rows(1),))
        thread.start()
        assert begun.wait(10)
        assert remembered.forget() == 0
        held.set()
        thread.join()
        remembered.flush()
        remembered(rows(1))
        assert COMPUTED == [1, 1]


def test_a_call_within_forget_stores_nothing_behind_it() -> None:
    with remember(Encoder()) as remembered:
        remembered(rows(1))
        flush = remembered._rows.flush

        def busy() -> bool:
            flushed: bool = flush()
            remembered(rows(2))
            return flushed

        remembered._rows.flush = busy
        assert remembered.forget() == 1
        remembered._rows.flush = flush
        remembered(rows(2))
        assert COMPUTED == [1, 1, 1]


def test_old_rows_are_computed_again() -> None:
    clock, x = ManualClock(10**18), rows(1, 2)
    with remember(Encoder(), ttl=60, clock=clock) as remembered:
        for advance_s, calls in ((0, 1), (59, 1), (2, 2), (59, 2), (2, 3)):
            clock.advance(s=advance_s)
            first = remembered(x)
            assert len(COMPUTED) == calls
            assert torch.equal(first, x * Encoder().weight * 2.0)
            assert remembered.flush()
        assert remembered.stats()["expired"] == 4


def test_tenants_never_see_what_others_computed() -> None:
    x = rows(1, 2)
    with remember(Encoder(), tenant="a") as remembered:
        other = remembered.tenant("b")
        remembered(x)
        assert COMPUTED == [2]
        other(x)
        assert COMPUTED == [2, 2]
        assert remembered.flush()
        assert remembered.forget() == 2  # its own
        other(x)
        assert COMPUTED == [2, 2]
        remembered(x)
        assert COMPUTED == [2, 2, 2]
        remembered.flush()
        assert remembered.forget(x[:1]) == 1
        remembered(x)
        assert COMPUTED == [2, 2, 2, 1]


def test_quotas_hold() -> None:
    with remember(
        Encoder(), places="host:64KiB", quotas={"a": "0B:8KiB", "b": "32KiB"}, tenant="a"
    ) as remembered:
        remembered.tenant("b")(rows(*range(100, 110)))
        for seed in range(30):
            remembered(rows(seed))
            remembered.flush()
        caller = remembered.keeper.caller()
        tenants = Counter(entry.info.tenant for entry in caller.scan())
        COMPUTED.clear()
        remembered.tenant("b")(rows(*range(100, 110)))
        assert COMPUTED == []
        assert len(tenants) == 2
        assert min(tenants.values()) <= 8


@pytest.mark.parametrize("seed", range(4))
def test_tiers_that_fail_cost_no_answer(seed: int) -> None:
    faults = Faults(fail=0.2, lose=0.2, flip=0.1, latency_s=0.01)
    keeper = keeper_over(FlakyTier(HostTier(1 << 20), seed, faults))
    with remember(Encoder(), places=keeper) as remembered:
        for step in range(12):
            x = rows(*range(step, step + 4))
            assert torch.equal(remembered(x), x * Encoder().weight * 2.0)
            if step % 3 == 0:
                remembered.flush()
    keeper.close()


class Hanging(HostTier):
    """Never answers a load."""

    def submit_load(self, items: Any, *, deadline_s: float = 10.0) -> int:
        return self._answers.new_job()


def test_what_is_computed_sooner_than_loaded_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    keeper, x = keeper_over(HostTier(1 << 20)), rows(1)
    with remember(Encoder(), places=keeper) as remembered:
        remembered(x)
        assert remembered.flush()
        keeper.gate.rates["host"].add(1 << 20, 100.0)
        assert torch.equal(remembered(x), x * Encoder().weight * 2.0)
        assert COMPUTED == [1, 1]
    keeper.close()


def test_a_tier_that_hangs_delays_no_longer_than_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("flowkv.residency.keeper._CLOSE_POLLS", 2)

    def slow(x: torch.Tensor) -> torch.Tensor:
        LOG(len(x))
        time.sleep(0.05)
        return x * 1.0

    keeper, x = keeper_over(Hanging(1 << 20)), rows(1)
    with remember(slow, key="slow", places=keeper) as remembered:
        remembered(x)
        assert remembered.flush()
        began_s = time.monotonic()
        for _ in range(4):
            assert torch.equal(remembered(x), x)
            assert remembered.flush()
        seconds = time.monotonic() - began_s
        assert COMPUTED == [1] * 5
        assert seconds < 4 * 0.05 + 5.0  # one wait as long as computing, and what is busy
        assert remembered.stats()["late"] == 1
    keeper.close()


def test_threads_agree() -> None:
    encoder, failures = Encoder(), []
    with remember(encoder, places="host:64KiB") as remembered:

        def work(number: int) -> None:
            chooses = np.random.default_rng(number)
            for _ in range(30):
                x = rows(*chooses.integers(0, 60, 5).tolist())
                if not torch.equal(remembered(x), x * encoder.weight * 2.0):
                    failures.append(number)

        together(*(partial(work, number) for number in range(4)))
        assert failures == []
        assert remembered.stats()["rows"] == 600


def test_a_forked_child_computes() -> None:
    x = rows(1, 2)
    with remember(Encoder()) as remembered:
        remembered(x)

        def computes() -> int:
            assert torch.equal(remembered(x), x * Encoder().weight * 2.0) and len(COMPUTED) == 2
            assert remembered.stats()["calls"] == 1 and not remembered.flush()
            with pytest.raises(StateError, match="parent"):
                remembered.forget()
            return 0

        with held(remembered._lock, remembered._rows._changed, remembered.keeper._lock):
            assert in_child(computes) == 0
        assert len(COMPUTED) == 1


def test_it_decorates_and_tells() -> None:
    bus, told = Bus(), list[Remembered]()
    bus.subscribe(told.append, Remembered)

    @flowkv.memo(places="host:1MiB", tenant="a", bus=bus, key="doubled")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        """Twice as much."""
        return x * 2

    doubled(rows(1, 2))
    doubled(rows(2, 3, 3))
    assert doubled.__doc__ == "Twice as much."
    assert [(one.rows, one.found, one.computed, one.tenant) for one in told] == [
        (2, 0, 2, "a"),
        (3, 1, 1, "a"),
    ]
    assert doubled.stats()["duplicates"] == 1
    doubled.close()
    doubled.close()
    assert torch.equal(doubled(rows(1)), rows(1) * 2)  # closed, it is the function


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates annotations at once")
def test_names_in_annotations_need_no_value() -> None:
    space = dict[str, Any]()
    text = "def double(x: Missing): return x * 2"
    exec(compile(text, "<text>", "exec", dont_inherit=True), space)
    double = remember(space["double"], key="double")
    assert torch.equal(double(rows(1)), rows(1) * 2)


def test_weights_written_uncounted_and_back_leave_no_row() -> None:
    module = torch.nn.Linear(4, 4, bias=False).eval().requires_grad_(False)
    right, x = module.weight.clone(), torch.ones(1, 4)
    with flowkv.memo(module, places="host:16MiB", policy="lru") as held:
        held(torch.zeros(1, 4))
        module.weight.data.copy_(right * 3)  # an average of weights, for one call
        held(x)
        module.weight.data.copy_(right)
        assert torch.equal(held(x), module(x))
        held.flush()
        assert torch.equal(held(x), module(x))


def test_as_what_results_are_made_is_in_the_name() -> None:
    x = rows(1)
    with remember(Encoder()) as held:
        for dtype, calls in ((torch.float32, 1), (torch.float64, 2), (torch.float32, 2)):
            torch.set_default_dtype(dtype)
            try:
                held(x)
                held.flush()
            finally:
                torch.set_default_dtype(torch.float32)
            assert len(COMPUTED) == calls


@pytest.mark.parametrize("odd", [2**70, -(2**63) - 1, "\ud800", {"\ud800": 1}, [(2**64,)]])
def test_what_no_name_can_hold_is_refused_in_words(odd: Any) -> None:
    expected = pytest.raises(UnsupportedModelError, match="input of")
    with remember(lambda x, odd: x * 2, key="odd") as remembered, expected:
        remembered(rows(1, 2), odd)


def test_a_compiled_module_is_remembered_apart_from_the_plain_one() -> None:
    encoder, x = Encoder().eval(), rows(1, 2)
    compiled = torch.compile(encoder, backend="eager")
    with flowkv.connect.open_keeper("host:4MiB") as keeper, torch.no_grad():
        with flowkv.memo(encoder, places=keeper) as plain:
            plain(x)
            assert plain.flush()
        with pytest.raises(UnsupportedModelError, match="key="):
            flowkv.memo(compiled, places=keeper)
        with flowkv.memo(compiled, places=keeper, key="compiled") as remembered:
            for _ in range(4):
                assert torch.equal(remembered(x), encoder(x))
                assert remembered.flush()
            told = remembered.stats()
    assert told["computed"] == 2 and told["found"] == 6  # none is the plain one's
