"""Sizes ("8GiB", "25%") and places ("disk:/nvme/kv:200GiB"), as people write them."""

from __future__ import annotations

import difflib
import os
import re
from fractions import Fraction
from urllib.parse import urlsplit

import msgspec

from flowkv.core.errors import ConfigError

_PREFIXES = ("k", "m", "g", "t", "p")
_UNITS = (
    {"": 1, "b": 1}
    | {f"{p}ib": 1024**i for i, p in enumerate(_PREFIXES, 1)}
    | {f"{p}b": 1000**i for i, p in enumerate(_PREFIXES, 1)}
)
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([A-Za-z]*|%)")
_WHOLE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*:(?://)?)(.*)", re.DOTALL)
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(\S*)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_MAX_BYTES = 2**63 - 1
_EXAMPLES = "Write a size like 8GiB, 512MiB, 200GB or 25%"

LOCAL_KINDS = ("gpu", "host", "disk")
"""Kinds of places on this machine, fastest first; every other kind is the scheme of a URI."""
_REMOTE = re.compile(
    r"(redis|rediss|valkey|valkeys|unix|mooncake|s3|gs|az|https?)(?=:/)", re.IGNORECASE
)


def parse_size(value: int | str, *, total_bytes: int | None = None) -> int:
    """Bytes meant by `value`.

    Args:
        value: A number of bytes, or text such as "8GiB" (powers of 1024), "200GB" (powers of
            1000), "4096" or "25%". Case does not matter; fractions of a byte are dropped.
        total_bytes: What a percentage is a part of.

    Raises:
        ConfigError: It is no size, is negative or above 100%, or is a percentage of nothing known.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= _MAX_BYTES:
            raise ConfigError(f"size {value} is out of range", _EXAMPLES)
        return value
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        said = without_secrets(value) if isinstance(value, str) else value
        raise ConfigError(f"{said!r} is not a size", _EXAMPLES)
    number, unit = Fraction(found[1]), found[2].lower()
    if unit == "%":
        if number > 100:
            raise ConfigError(f"size {value!r} is more than everything", "Write at most 100%")
        if total_bytes is None:
            raise ConfigError(
                f"size {value!r} is a share of an unknown total", "Write bytes, such as 8GiB"
            )
        return int(number * total_bytes / 100)
    if unit in _PREFIXES or (unit[:-1] in _PREFIXES and unit[-1] == "i"):
        letter = unit[0].upper()
        raise ConfigError(
            f"unit {found[2]!r} of size {value!r} is ambiguous",
            f"Write {found[1]}{letter}iB (powers of 1024) or {found[1]}{letter}B (powers of 1000)",
        )
    if unit not in _UNITS:
        raise ConfigError(f"unit {found[2]!r} of size {value!r} is unknown", _EXAMPLES)
    n_bytes = int(number * _UNITS[unit])
    if n_bytes > _MAX_BYTES:
        raise ConfigError(f"size {value!r} is out of range", _EXAMPLES)
    return n_bytes


def format_size(n_bytes: int) -> str:
    """`n_bytes` for people: "512B", "8GiB", "1.46TiB"; `parse_size` is within 0.5% of it."""
    if n_bytes < 0:
        return "-" + format_size(-n_bytes)
    if n_bytes < 1024:
        return f"{n_bytes}B"
    unit = 1024
    for prefix in _PREFIXES:
        hundredths = (200 * n_bytes + unit) // (2 * unit)
        # Decided after rounding, so that no size is ever shown as "1024KiB".
        if hundredths < 102400 or prefix == _PREFIXES[-1]:
            break
        unit *= 1024
    whole, rest = divmod(hundredths, 100)
    fraction = f".{rest:02d}".rstrip("0") if rest else ""
    return f"{whole}{fraction}{prefix.upper()}iB"


def without_secrets(text: str) -> str:
    """`text` as it may be shown: no user, password or option's value of any URI in it.

    A text that begins like a URI is one to its end, whatever is in it; else URIs end at blanks.
    """
    text, whole = str(text), re.match(r"\s*[A-Za-z][A-Za-z0-9+.-]*:", text)
    return (_WHOLE if whole else _URI).sub(_masked, text)


def _masked(uri: re.Match[str]) -> str:
    scheme, rest = uri[1], uri[2]
    user, at, behind = rest.rpartition("@")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if scheme.rstrip(":") in LOCAL_KINDS:
        rest = f"...@{behind}" if at and ":" in user else rest
    elif at and not re.search(r"[/?#]", user):
        rest = f"...@{behind}"
    elif at and (":" in host or "@" in host):  # a password with such signs, or a path with an @
        return f"{scheme}..."
    rest, mark, options = rest.partition("?")
    shown = (f"{option.partition('=')[0]}=..." for option in options.split("&") if "=" in option)
    return scheme + rest.partition("#")[0] + (mark and mark + ("&".join(shown) or "..."))


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where frames may lie, as configured; `str(place)` parses back to it, secrets included.

    Attributes:
        kind: "gpu" (the device pool, wherever the layers compute), "host", "disk", or the scheme
            of a URI ("s3", "redis", ...).
        path: Directory of a disk, name of a host tier that processes share, or the whole URI
            without its size; "" for gpu and for a host tier of one process.
        size: Size as given ("8GiB", "25%"); "" if none was.
    """

    kind: str
    path: str = ""
    size: str = ""

    @property
    def remote(self) -> bool:
        """Whether it lies behind a URI."""
        return self.kind not in LOCAL_KINDS

    def size_bytes(self, total_bytes: int | None = None) -> int | None:
        """Its size; None if none was given.

        Args:
            total_bytes: Memory of the device or host, or bytes of the file system, for a size
                that is a percentage.

        Raises:
            ConfigError: The size is a percentage and `total_bytes` is None.
        """
        return parse_size(self.size, total_bytes=total_bytes) if self.size else None

    def __repr__(self) -> str:
        """Its fields; no secret of a URI is shown."""
        path = without_secrets(self.path)
        return f"Place(kind={self.kind!r}, path={path!r}, size={self.size!r})"

    def __str__(self) -> str:
        head = () if self.remote else (self.kind,)
        return ":".join((*head, *(part for part in (self.path, self.size) if part)))


def parse_place(text: str) -> Place:
    """The place meant by `text`.

    Forms: "gpu:8GiB", "host:25%", "host:NAME:8GiB" (memory that processes share under a name),
    "disk:/nvme/kv:200GiB", "./kv:200GiB" (a path with a slash is a disk), "s3://bucket/kv". The
    size may be left out, but not behind a NAME. A path may hold colons: only what follows the last
    one is a size, and only if it begins with a digit. In a URI a bare number is a port.

    Raises:
        ConfigError: The kind is unknown, the size is none, or a path is missing or misplaced.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"{without_secrets(text)!r} is not a place", "Write gpu:8GiB, host:32GiB or disk:./kv"
        )
    text = text.strip()
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme:
        return _remote(scheme[1].lower(), text)
    kind, colon, rest = text.partition(":")
    if kind in ("gpu", "host"):
        if colon and not rest:
            raise ConfigError(
                f"place {without_secrets(text)!r} ends with a colon", f"Write {kind}:8GiB or {kind}"
            )
        if kind == "host" and ":" in rest:
            return _shared(rest, text)
        if rest:
            _checked_size(rest, text)
        return Place(kind, size=rest)
    if kind == "disk":
        _not_a_uri(rest, text)
        return _disk(rest, text)
    _not_a_uri(text, text)
    if "/" in text or text.startswith((".", "~")):
        return _disk(text, text)
    raise _unknown(kind, text)


def _not_a_uri(path: str, text: str) -> None:
    """Refuses what is a URI but for a slash, or behind a kind: a directory would bear its password.

    Raises:
        ConfigError: It is one.
    """
    found = _REMOTE.match(path)
    if found:
        raise ConfigError(
            f"place '{text[: text.index(path)]}{found[1]}:...' is a URI in the wrong place, or"
            " lacks a slash",
            f"Write {found[1]}://..., or ./{found[1]}:... for a directory of that name",
        )


def _unknown(kind: str, text: str) -> ConfigError:
    close = difflib.get_close_matches(kind.lower(), LOCAL_KINDS, n=1)
    if kind.lower() in ("cuda", "device", "vram"):
        close = ["gpu"]
    elif kind.lower() in ("cpu", "ram", "pinned"):
        close = ["host"]
    remedy = f"For a directory write disk:{without_secrets(text)}"
    if close:
        remedy = f"Did you mean {close[0]}{without_secrets(text)[len(kind) :]}? {remedy}"
    return ConfigError(
        f"place {without_secrets(text)!r} is neither gpu, host, disk, a path nor a URI", remedy
    )


def _checked_size(size: str, text: str) -> None:
    try:
        n_bytes = parse_size(size, total_bytes=_MAX_BYTES)
    except ConfigError as error:
        raise ConfigError(
            f"place {without_secrets(text)!r}: {error.problem}", error.remedy
        ) from None
    if not n_bytes:
        raise ConfigError(
            f"place {without_secrets(text)!r} has no room", "Leave the place out to do without it"
        )


def _shared(rest: str, text: str) -> Place:
    _not_a_uri(rest, text)
    name, _, size = rest.partition(":")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"place {without_secrets(text)!r} has no name that processes could share",
            "Write host:NAME:8GiB, the name a letter and up to 63 letters, digits, - or _",
        )
    _checked_size(size, text)
    return Place("host", name, size)


def _disk(rest: str, text: str) -> Place:
    path, colon, size = rest.rpartition(":")
    if not colon or not size[:1].isdigit() or "/" in size:
        path, size = rest, ""
    elif size.isdigit():  # a forgotten unit is likelier than a directory of 200 bytes
        shown = without_secrets(f"disk:{path}").removeprefix("disk:")
        raise ConfigError(
            f"place {without_secrets(text)!r} ends with a number without a unit",
            f"Write {shown}:{size}GiB for a size, or {shown}:{size}/ for a path",
        )
    if size:
        _checked_size(size, text)
    if not path or (not size and (path.endswith(":") or _SIZE.fullmatch(path))):
        raise ConfigError(
            f"place {without_secrets(text)!r} names no directory", "Write disk:./kv:200GiB"
        )
    if "\0" in path:
        raise ConfigError(
            f"place {without_secrets(text)!r} holds a zero byte", "Write an ordinary path"
        )
    return Place("disk", os.path.expanduser(path), size)


def _remote(scheme: str, text: str) -> Place:
    if scheme in (*LOCAL_KINDS, "file"):
        kind = "disk" if scheme == "file" else scheme
        raise ConfigError(
            f"place {without_secrets(text)!r} is written like a URI", f"Write {kind}:... without //"
        )
    try:
        urlsplit(text)
    except ValueError:  # whose text may quote the password
        raise ConfigError(
            f"place {without_secrets(text)!r} is no URI",
            "Close brackets of an IPv6 address, and write % and two hex digits for odd signs",
        ) from None
    path, _, size = text.rpartition(":")
    # Digits alone are a port, and "//host" belongs to the scheme; both leave the URI whole.
    if size.isdigit() or not _SIZE.fullmatch(size):
        path, size = text, ""
    elif size.endswith("%"):
        raise ConfigError(
            f"place {without_secrets(text)!r}: a share of a remote store", "Write bytes, like 4TiB"
        )
    else:
        _checked_size(size, text)
    if path.endswith("://"):
        raise ConfigError(
            f"place {without_secrets(text)!r} names no host or bucket",
            f"Write {scheme}://bucket/kv",
        )
    return Place(scheme, path, size)
