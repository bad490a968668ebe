"""Errors of FlowKV. Every message ends with the next step."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from types import MappingProxyType


class FlowKVError(Exception):
    """Base of all errors raised on purpose by FlowKV.

    Args:
        problem: The problem in one sentence, without a full stop.
        remedy: The user's next step in one sentence, without a full stop.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}. {remedy}.")
        self.problem, self.remedy = problem, remedy

    def __reduce__(self) -> tuple[type[FlowKVError], tuple[str, ...]]:
        return type(self), (self.problem, self.remedy)


class ExperimentalWarning(FutureWarning):
    """Warning for a feature that works and is tested, but may still change with a minor release."""


def experimental(what: str, why: str) -> None:
    """Warn, at an import of a module or a call of a function, that it may still change."""
    silence = "warnings.simplefilter('ignore', flowkv.ExperimentalWarning)"
    text = f"{what} is experimental: {why} (to silence: {silence})"
    warnings.warn(text, ExperimentalWarning, stacklevel=3)


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return the beginning of a remedy for a name outside of `names`; "" where none is near."""
    near = get_close_matches(str(name), list(names), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


class ConfigError(FlowKVError, ValueError):
    """Error for a wrong configuration field, size or place."""


def refuse_unknown(problem: str, name: str, names: Collection[str], remedy: str = "") -> None:
    """Check that a name is one of some.

    Raises:
        ConfigError: It is none of them; `problem` goes before it.
    """
    if name not in names:
        remedy = remedy or f"Use one of {', '.join(names)}"
        raise ConfigError(f"{problem} {name!r}", did_you_mean(name, names) + remedy)


class GeometryError(FlowKVError, ValueError):
    """Error for tensors, layers or devices that do not fit the geometry of the cache."""


class TokenError(FlowKVError, ValueError):
    """Error for token ids that are out of range or do not fit the sequence."""


class CapacityError(FlowKVError, MemoryError):
    """Error for a request that does not fit the pages, rows or bytes that are there."""


class BusyError(CapacityError):
    """Error for a request that may fit later: too much is under way already."""


class StateError(FlowKVError, RuntimeError):
    """Error for the use of an object after its closing, or in the wrong order or thread."""


class StoreError(FlowKVError, OSError):
    """Error for a store directory or tier that cannot be used."""

    def __str__(self) -> str:  # OSError formats two arguments as "[Errno ...]"
        return f"{self.problem}. {self.remedy}."


@contextmanager
def stating(problem: str, remedy: str) -> Iterator[None]:
    """Raise a `StoreError`, with its cause, for an `OSError` of the context."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{problem} ({error.strerror or error})", remedy) from error


class NonFiniteError(FlowKVError, ArithmeticError):
    """Error for keys or values with NaN or infinity, which may not be stored."""


class UnsupportedModelError(FlowKVError, TypeError):
    """Error for a model, or an input of it, that cannot be served from pages."""


class MissingDependencyError(FlowKVError, ImportError):
    """Error for an optional dependency that is not installed.

    Args:
        feature: The feature that cannot be used.
        extra: Extra of this package that brings the dependency.
        needs: The dependency, in words.
    """

    def __init__(self, feature: str, extra: str, needs: str = "an optional dependency") -> None:
        super().__init__(f"{feature} needs {needs}", f"pip install 'flowkv[{extra}]'")
        self.feature, self.extra, self.needs = feature, extra, needs

    def __reduce__(self) -> tuple[type[FlowKVError], tuple[str, ...]]:
        return type(self), (self.feature, self.extra, self.needs)


class MissingLibraryError(FlowKVError, ImportError):
    """Error for an installed optional dependency without a library of the system that it needs."""


# Libraries of the system that wheels need and pip does not bring, and the packages that do.

MOONCAKE: Mapping[str, str] = MappingProxyType(
    {
        "libibverbs.so.1": "libibverbs1",
        "librdmacm.so.1": "librdmacm1",
        "libnuma.so.1": "libnuma1",
        "libcurl.so.4": "libcurl4",
    }
)
"""Libraries that the wheels of Mooncake need, and their packages in Debian and Ubuntu."""


def missing(libraries: Iterable[str] = MOONCAKE) -> list[str]:
    """Return the libraries that the system's loader does not find."""
    return [library for library in libraries if not _loads(library)]


def remedy(libraries: Iterable[str], packages: Mapping[str, str] = MOONCAKE) -> str:
    """Return the command that installs libraries; their names elsewhere are similar."""
    wanted = [packages.get(library, library) for library in libraries]
    return f"apt-get install {' '.join(wanted)}"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
