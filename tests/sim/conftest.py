"""numba's cache of a file does not see edits of the files it calls into: drop what is older."""

from __future__ import annotations

from pathlib import Path

import flowkv.policy

HOMES = [Path(flowkv.policy.__file__).parent, Path(flowkv.policy.__file__).parents[1] / "sim"]
NEWEST = max(path.stat().st_mtime for home in HOMES for path in home.glob("*.py"))

for home in HOMES:
    for index in home.glob("__pycache__/*.nbi"):
        if index.stat().st_mtime < NEWEST:
            index.unlink(missing_ok=True)
