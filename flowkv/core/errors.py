"""Errors of FlowKV. Every message ends with what to do next."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType


class FlowKVError(Exception):
    """Base of all errors raised on purpose by FlowKV.

    Args:
        problem: What is wrong, one sentence without a full stop.
        remedy: What the user does next, one sentence without a full stop.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}.")
        self.problem, self.remedy = problem, remedy

    def __reduce__(self) -> tuple[type[FlowKVError], tuple[str, ...]]:
        return type(self), (self.problem, self.remedy)


class ExperimentalWarning(FutureWarning):
    """What is used works and is tested, and may still change with a minor release."""


def experimental(what: str, why: str) -> None:
    """Says where a module is imported, or a function is called, that it may still change."""
    silence = "warnings.simplefilter('ignore', flowkv.ExperimentalWarning)"
    text = f"{what} is experimental: {why} (to silence: {silence})"
    warnings.warn(text, ExperimentalWarning, stacklevel=3)


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """The beginning of a remedy for a name that is none of `names`; "" where none is near."""
    near = get_close_matches(str(name), list(names), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


class ConfigError(FlowKVError, ValueError):
    """A configuration field, size or place is wrong."""


class GeometryError(FlowKVError, ValueError):
    """Tensors, layers or devices do not fit the geometry of the cache."""


class TokenError(FlowKVError, ValueError):
    """Token ids are out of range or do not fit the sequence."""


class CapacityError(FlowKVError, MemoryError):
    """A request does not fit the pages, rows or bytes that are there."""


class BusyError(CapacityError):
    """Too much is under way already; later it may fit."""


class StateError(FlowKVError, RuntimeError):
    """An object is used after it was closed, or in the wrong order or thread."""


class StoreError(FlowKVError, OSError):
    """A store directory or tier cannot be used."""

    def __str__(self) -> str:  # OSError formats two arguments as "[Errno ...]"
        return f"{self.problem}. {self.remedy}."


class NonFiniteError(FlowKVError, ArithmeticError):
    """Keys or values hold NaN or infinity and may not be stored."""


class UnsupportedModelError(FlowKVError, TypeError):
    """A model (or an input of it) cannot be served from pages."""


class MissingDependencyError(FlowKVError, ImportError):
    """An optional dependency is not installed.

    Args:
        feature: What cannot be used.
        extra: Of this package, which brings what is needed.
        needs: What that is.
    """

    def __init__(self, feature: str, extra: str, needs: str = "an optional dependency") -> None:
        super().__init__(f"{feature} needs {needs}", f"pip install 'flowkv[{extra}]'")
        self.feature, self.extra, self.needs = feature, extra, needs

    def __reduce__(self) -> tuple[type[FlowKVError], tuple[str, ...]]:
        return type(self), (self.feature, self.extra, self.needs)


class MissingLibraryError(FlowKVError, ImportError):
    """An optional dependency is installed, and a library of the system that it needs is not."""


# Libraries of the system that wheels need and pip does not bring, and the packages that do.

MOONCAKE: Mapping[str, str] = MappingProxyType(
    {
        "libibverbs.so.1": "libibverbs1",
        "librdmacm.so.1": "librdmacm1",
        "libnuma.so.1": "libnuma1",
        "libcurl.so.4": "libcurl4",
    }
)
"""What the wheels of Mooncake need: a library, and the package that has it in Debian and Ubuntu."""


def missing(libraries: Iterable[str] = MOONCAKE) -> list[str]:
    """Those that the system's loader does not find."""
    return [library for library in libraries if not _loads(library)]


def remedy(libraries: Iterable[str], packages: Mapping[str, str] = MOONCAKE) -> str:
    """The command that installs libraries; their names elsewhere are similar."""
    wanted = [packages.get(library, library) for library in libraries]
    return f"apt-get install {' '.join(wanted)}"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
