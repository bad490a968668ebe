"""An audit of the whole suite's run: calls that FlowKV must never make, whatever the input.

An audit hook looks at who asks. Python's own libraries, numba's cache and pytest may unpickle and
compile; a frame of ours may not, nor may anything that it calls open a port for others, but for
`flowkv serve`, which a user runs as a server.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

PACKAGE = f"{Path(__file__).resolve().parents[1] / 'flowkv'}/"
TRUSTING = frozenset(
    {"pickle.find_class", "marshal.load", "marshal.loads", "compile", "exec", "code.__new__"}
)
"""Bytes become code, or objects of any class."""
OPENING = frozenset({"socket.bind"})
SERVER = f"{PACKAGE}hooks/huggingface/serve.py"


class Forbidden(AssertionError):
    """A frame of ours did what none may."""


def watch() -> None:
    """Watches from now on until the process ends; a second call changes nothing."""
    if not getattr(sys, "_flowkv_watched", False):
        sys._flowkv_watched = True  # type: ignore[attr-defined]
        sys.addaudithook(_look)


def _look(event: str, arguments: tuple[object, ...]) -> None:
    if event in TRUSTING:
        frame = sys._getframe(1)
        if _ours(frame):
            raise Forbidden(f"{event} in {frame.f_code.co_filename}:{frame.f_lineno}")
    elif event in OPENING:
        found: FrameType | None = sys._getframe(1)
        while found is not None and found.f_code.co_filename != SERVER:
            if _ours(found):
                raise Forbidden(f"{event} below {found.f_code.co_filename}:{found.f_lineno}")
            found = found.f_back


def _ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(PACKAGE)
