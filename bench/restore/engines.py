"""The engines that can run the protocol, by name."""

from __future__ import annotations

from bench.restore.protocol import Engine
from flowkv.core.errors import ConfigError

ENGINES = ("virtual", "emulated", "cpu", "cuda")


def make_engine(name: str, *, full: bool = False) -> Engine:
    """An engine of the protocol.

    Args:
        name: Of `ENGINES`.
        full: Whether it plays every row of the protocol, as often as that says.

    Raises:
        ConfigError: If there is none of that name, or this machine has no such device.
    """
    if name == "virtual":
        from bench.restore.modelled import Virtual

        return Virtual(full=full)
    if name == "emulated":
        from bench.restore.modelled import Emulated

        return Emulated(full=full)
    if name in ("cpu", "cuda"):
        from bench.restore.real import Cuda, Processor

        return Cuda(full=full) if name == "cuda" else Processor(full=full)
    raise ConfigError(f"there is no engine {name!r}", f"Use {', '.join(ENGINES)}")
