"""Tasks of a newcomer from the wheel, in an empty environment and home, with their times.

    python -m tests.newcomer [WORD...]     words: only tasks whose names hold one of them

The wheel is built and installed without what it needs, which is that of this environment. Guides
are children of one process that has imported what they begin with.
"""

from __future__ import annotations

import json
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
CHILDREN = """
import json, os, runpy, sys, time
from pathlib import Path

import flowkv
from transformers import AutoModelForCausalLM

flowkv.attach, flowkv.KV
for file in map(Path, sys.argv[1:]):
    said, begun = file.with_suffix(".out"), time.monotonic()
    child = os.fork()
    if child == 0:
        place = os.open(said, os.O_WRONLY | os.O_CREAT)
        os.dup2(place, 1)
        os.dup2(place, 2)
        held = runpy.run_path(str(file), run_name="__main__")
        break  # to the end of the interpreter
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps([status, said.read_text(), time.monotonic() - begun]), flush=True)
"""


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


def done(newcomer: Stranger, chosen: dict[str, str]) -> Iterator[tuple[str, float, str]]:
    """Have a newcomer do tasks; yields the name of each, its seconds, and how it failed."""
    guides = {name: code for name, code in chosen.items() if name.startswith("guide: ")}
    for name, what in chosen.items():
        if name not in guides:
            begun, file = time.monotonic(), newcomer.work / "program.py"
            if what.startswith("flowkv "):
                verb, *words = what.split()
                newcomer.run(newcomer.bin / verb, *words)
            else:
                file.write_text(what)
                newcomer.run(newcomer.bin / "python", file)
            yield name, time.monotonic() - begun, ""
    files = [newcomer.work / f"{name.removeprefix('guide: ')}.py" for name in guides]
    for file, code in zip(files, guides.values(), strict=True):
        file.write_text(code)
    (newcomer.work / "children.py").write_text(CHILDREN)
    told = newcomer.run(newcomer.bin / "python", newcomer.work / "children.py", *files)
    lines = [line for line in told.splitlines() if line.startswith("[")]
    for name, line in zip(guides, lines, strict=True):
        status, said, took_s = json.loads(line)
        yield name, took_s, f"ended with {status}: {said[-4000:]}" if status else ""


def main(words: list[str]) -> int:
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        newcomer = settle(Path(place))
        print(f"{time.monotonic() - begun:7.1f} s  build, install", flush=True)
        chosen = {n: w for n, w in tasks() if not words or any(word in n for word in words)}
        for name, took_s, fault in done(newcomer, chosen):
            print(f"{took_s:7.1f} s  {name} {fault}", flush=True)
            failed += bool(fault)
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
