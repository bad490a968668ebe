"""Errors survive pickling and copying, and end with what to do next."""

from __future__ import annotations

import copy
import pickle

import pytest

from flowkv import FlowKVError
from tests.inside import MissingDependencyError, StoreError, did_you_mean, errors

PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, FlowKVError)
    and kind is not MissingDependencyError
]


@pytest.mark.parametrize("kind", PLAIN)
def test_message_and_round_trips(kind: type[FlowKVError]) -> None:
    error = kind("the pool is full", "Close a sequence")
    for other in (error, pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is kind
        assert str(other) == "the pool is full. Close a sequence."
        assert (other.problem, other.remedy) == ("the pool is full", "Close a sequence")


def test_missing_dependency_names_the_extra() -> None:
    error = MissingDependencyError("attach()", "hf")
    for other in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(other, ImportError)
        assert str(other) == ("attach() needs an optional dependency. pip install 'flowkv[hf]'.")
        assert (other.feature, other.extra) == ("attach()", "hf")


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        *((errors.ConfigError, ValueError), (errors.CapacityError, MemoryError)),
        *((errors.BusyError, errors.CapacityError), (errors.StateError, RuntimeError)),
        *((StoreError, OSError), (errors.NonFiniteError, ArithmeticError)),
        (errors.UnsupportedModelError, TypeError),
    ],
)
def test_errors_are_also_builtin_errors(kind: type[FlowKVError], builtin: type) -> None:
    with pytest.raises(builtin):
        raise kind("p", "r")


def test_a_store_error_has_no_errno() -> None:
    with pytest.raises(StoreError) as caught:
        raise StoreError("the directory is locked", "Close the other process")
    assert not isinstance(caught.value.errno, int)


def test_names_that_are_nearly_right_are_named() -> None:
    assert did_you_mean("fcsf", ["fcfs", "priority"]) == "Did you mean 'fcfs'? "
    assert did_you_mean(7, iter(["fcfs"])) == did_you_mean("nothing like it", ["fcfs"]) == ""
