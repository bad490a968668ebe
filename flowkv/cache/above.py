"""Constructors from packages above the cache, for methods of `KV`; `flowkv` sets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `flowkv` imports this module, and no work is done at its import
    from flowkv.observe.timeline import OpenReport

open_cache: Callable[..., Any]
"""`flowkv.hooks.huggingface.make_cache`."""

open_report: Callable[..., OpenReport]
"""`flowkv.report.account.Account`."""
