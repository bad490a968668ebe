"""Bases in files, which other programs than the one that learned them can open."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec

from flowkv.core.errors import ConfigError
from flowkv.core.files import MALFORMED, open_regular, replacing
from flowkv.core.geometry import LayerGroup, page_layout
from flowkv.kvt.basis import digest
from flowkv.kvt.codec import PageCoder, codable

_log = logging.getLogger("flowkv")
_MAGIC = b"flowkv basis/1\n"


class BasisFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a file behind its first bytes and a digest.

    Attributes:
        model: Name of the model whose pages it was learned from.
        group: Their layer group.
        page_size: Tokens of these pages.
        data: The basis.
    """

    model: str
    group: LayerGroup
    page_size: int
    data: bytes


def save_basis(path: Path, basis: BasisFile) -> None:
    """Write a file of a basis.

    Raises:
        ConfigError: It cannot be written.
    """
    body = msgspec.msgpack.encode(basis)
    try:
        with replacing(path) as file:
            file.write(_MAGIC + digest(body) + body)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error})", "Name another file") from error


class OpenBasis(NamedTuple):
    """An opened file.

    Attributes:
        path: The file.
        model: Name of the model whose pages the basis was learned from.
        coder: Coder of these pages.
    """

    path: Path
    model: str
    coder: PageCoder

    def __str__(self) -> str:
        """Return the words for errors."""
        return f"the basis {self.path} of {self.model}"


class Unfit:
    """Count of parts of prompts, and of those that a basis does not fit, which is logged at times.

    Args:
        basis: The basis.
        instead: Codec of the others.
    """

    def __init__(self, basis: OpenBasis, instead: str) -> None:
        self._basis, self._instead, self._tried, self._unfit = basis, instead, 0, 0
        self._counting = threading.Lock()

    def count_part(self, model: str, *, fits: bool) -> None:
        """Count a part of a prompt of a model."""
        with self._counting:
            self._tried += 1
            self._unfit += not fits
            unfit, tried = self._unfit, self._tried
        if not fits and not unfit & (unfit - 1):  # 1, 2, 4, ...
            said = "%d of %d objects of %s are stored in %s: %s was learned from something else. If"
            said += " they are many, make one of this model and such texts: flowkv calibrate"
            _log.warning(said, unfit, tried, model, self._instead, self._basis)


def open_basis(path: Path) -> OpenBasis:
    """Read a file that `save_basis` wrote.

    Raises:
        ConfigError: There is no such file, or it is damaged.
    """
    remedy = "Make one: flowkv calibrate --model ... --text ... --out FILE"
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"the basis {path} cannot be read ({error})", remedy) from error
    start = len(_MAGIC) + 16
    try:
        if data[:start] != _MAGIC + digest(body := data[start:]):
            raise ValueError("its digest is another")
        found = msgspec.msgpack.decode(body, type=BasisFile)
        layout = page_layout(found.group, found.page_size)
        if not codable(layout):
            raise ValueError("pages that cannot be coded")
        return OpenBasis(path, found.model, PageCoder(layout, found.data))
    except MALFORMED as error:
        raise ConfigError(f"{path} holds no basis, or a damaged one ({error})", remedy) from error
