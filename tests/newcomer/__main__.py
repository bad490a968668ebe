"""Tasks of a newcomer from the wheel, in an empty environment and home, with their times.

    python -m tests.newcomer [WORD...]     words: only tasks whose names hold one of them

The wheel is built and installed without what it needs, which is that of this environment.
"""

from __future__ import annotations

import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.test_artifacts import Stranger
from tests.test_docs import DOCS, ROOT, blocks

SMALL = "--context 160 --turns 2 --rows 1 --repeats 1 --max-new-tokens 4"


def program(page: Path, *, first: bool = False) -> str:
    """The Python of a page that runs; or its first block alone."""
    code = [block.code for block in blocks(page, page.read_text()) if block.runs]
    return "\n".join(code[:1] if first else code)


def tasks() -> Iterator[tuple[str, str]]:
    """Names, and a command line or a program, in the order in which a newcomer meets them."""
    readme, quickstart = ROOT / "README.md", DOCS / "quickstart.md"
    yield "version", "flowkv --version"
    yield "README: first answer", program(readme)
    yield "README: in the next process", program(readme)
    yield "quickstart", program(quickstart)
    yield "doctor", "flowkv doctor"
    yield "demo", f"flowkv demo {SMALL}"
    for page in sorted((DOCS / "guides").glob("*.md")):
        if code := program(page, first=True):
            yield f"guide: {page.stem}", code


def settle(place: Path) -> Stranger:
    """A newcomer's environment and home, with the wheel."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(place), str(ROOT)]
    subprocess.run(pip, check=True, timeout=600)
    (wheel,) = place.glob("*.whl")
    newcomer = Stranger(place)
    newcomer.make("--no-deps", wheel)
    (newcomer.packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return newcomer


def seconds(newcomer: Stranger, name: str, what: str) -> float:
    """Let a newcomer do a task; how long that took."""
    begun = time.monotonic()
    if what.startswith("flowkv "):
        verb, *words = what.split()
        newcomer.run(newcomer.bin / verb, *words)
    else:
        file = newcomer.work / "program.py"
        file.write_text(what)
        newcomer.run(newcomer.bin / "python", file)
    return time.monotonic() - begun


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        newcomer = settle(Path(place))
        print(f"{time.monotonic() - begun:7.1f} s  build, install", flush=True)
        for name, what in tasks():
            if not words or any(word in name for word in words):
                print(f"{seconds(newcomer, name, what):7.1f} s  {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
