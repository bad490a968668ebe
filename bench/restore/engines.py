"""The engines that can run the protocol, by name."""

from __future__ import annotations

from bench.restore.protocol import Engine
from flowkv.core.errors import ConfigError

ENGINES = ("virtual", "emulated", "cpu")


def make_engine(name: str, *, full: bool = False) -> Engine:
    """An engine of the protocol.

    Args:
        name: Of `ENGINES`.
        full: Whether the virtual and emulated ones play every row of the protocol.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name == "virtual":
        from bench.restore.modelled import Virtual

        return Virtual(full=full)
    if name == "emulated":
        from bench.restore.modelled import Emulated

        return Emulated(full=full)
    if name == "cpu":
        from bench.restore.real import Processor

        return Processor()
    raise ConfigError(f"there is no engine {name!r}", f"Use {', '.join(ENGINES)}")
