"""numba's cache of a file does not see edits of the files it calls into: drop what is older."""

from __future__ import annotations

from pathlib import Path

import flowkv.policy

HOME = Path(flowkv.policy.__file__).parent
NEWEST = max(path.stat().st_mtime for path in HOME.glob("*.py"))

for index in HOME.glob("__pycache__/*.nbi"):
    if index.stat().st_mtime < NEWEST:
        index.unlink(missing_ok=True)
