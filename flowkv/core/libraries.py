"""Libraries of the system that wheels need and pip does not bring, and the packages that do."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from types import MappingProxyType

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
