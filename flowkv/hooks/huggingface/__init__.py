"""Door for Hugging Face models; the only package that imports transformers."""

from __future__ import annotations

from flowkv.core.errors import MissingDependencyError

try:
    import transformers as _transformers
except ImportError as error:
    raise MissingDependencyError("flowkv.attach", "hf") from error

from flowkv.hooks.huggingface.attach import Report, attach, make_cache, verify
from flowkv.hooks.huggingface.runners import make_runner_parts

__all__ = ["Report", "attach", "make_cache", "make_runner_parts", "verify"]

del _transformers
