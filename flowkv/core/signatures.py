"""Parameters of functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

# `annotationlib.Format.STRING`: names in annotations may have no value (PEP 649).
_AS_TEXT: Any = {"annotation_format": 4} if sys.version_info >= (3, 14) else {}


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name, in their order.

    Raises:
        TypeError, ValueError: It is a function in C without a signature.
    """
    return inspect.signature(function, **_AS_TEXT).parameters
