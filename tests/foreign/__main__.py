"""`python -m tests.foreign [SUITE...]`: no test of others may fail that passes without FlowKV.

Downloads the source archives of PEFT, accelerate and transformers, makes an environment of its own
with FlowKV from this tree, and runs their tests twice: as they are, and with FlowKV attached to
every model that they make. What passed the first time must pass the second time.

`--tests DIR` adds a checkout of transformers' repository (its generation and cache tests are in no
archive). Everything lies in `.venv-foreign`; results are kept there, so that a run that was stopped
goes on where it was (`--fresh` begins anew).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PLACE = ROOT / ".venv-foreign"
PYTHON = PLACE / "bin" / "python"
PINS = {"peft": "0.21.2", "accelerate": "1.15.0", "transformers": "5.23.0"}
TOOLS = ["pytest", "pytest-timeout", "pytest-xdist", "parameterized", "datasets", "scipy"]
TOOLS += ["diffusers", "httpx", "Pillow", "protobuf", "sentencepiece", "setuptools", "wheel"]
TOOLS += ["onnxscript", "onnxruntime"]
RETRIES = 3
"""Runs without FlowKV in which a test that failed only with it may show that it fails by itself."""


@dataclass(frozen=True)
class Suite:
    """What is run of one project.

    Args:
        files: Its test files, in the order in which they run.
        causal: Those about causal language models; most of their tests must have run.
    """

    files: tuple[str, ...]
    causal: tuple[str, ...] = ()


def tests(names: str, prefix: str = "tests/test_") -> tuple[str, ...]:
    """Paths of test files out of their names."""
    return tuple(f"{prefix}{name}.py" for name in names.split())


FAMILIES = "llama qwen2 qwen3 mistral gemma2 gemma3 gpt2"
MODELS = tuple(f"tests/models/{name}/test_modeling_{name}.py" for name in FAMILIES.split())
SUITES = {
    "peft": Suite(
        tests(
            "decoder_models encoder_decoder_models mixed torch_compile xlora arrow cpt cartridge"
            " adaption_prompt multitask_prompt_tuning shadow trainable_tokens target_parameters"
            " tuners_utils lora_variants other low_level_api seq_classifier"
            " feature_extraction_models custom_models"
        ),
        tests("decoder_models torch_compile mixed arrow cpt cartridge adaption_prompt"),
    ),
    "accelerate": Suite(tests("big_modeling hooks offload modeling_utils")),
    "checkout": Suite(
        (*MODELS, "tests/utils/test_cache_utils.py", "tests/generation/test_utils.py"),
        (*MODELS, "tests/utils/test_cache_utils.py"),
    ),
}


@dataclass
class Outcome:
    """What became of the tests of one file, by node id; `counts` is what the plugin counted."""

    tests: dict[str, dict[str, str]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    ended: bool = False

    def of(self, *outcomes: str) -> list[str]:
        """The tests that ended in one of these ways."""
        return [test for test, line in self.tests.items() if line["outcome"] in outcomes]


class Bench:
    """The environment, the archives, and the runs.

    Args:
        keyword: pytest's `-k`, "" for all tests.
        sample: One of so many tests is run, chosen by its name.
        limit_s: A test that takes longer has failed.
        warm: With FlowKV, prompts are generated twice, so that answers come of known pages.
    """

    def __init__(self, keyword: str, sample: int, limit_s: int, *, warm: bool) -> None:
        self._keyword, self._sample, self._limit_s = keyword, sample, limit_s
        self.results = PLACE / "results" / f"{sample}-{re.sub(r'[^a-z0-9]+', '-', keyword)}"
        self._warm = warm
        self._ini = PLACE / "pytest.ini"

    def install(self) -> None:
        """Makes the environment with FlowKV from this tree in it."""
        if not PYTHON.exists():
            subprocess.run([sys.executable, "-m", "venv", PLACE], check=True)
        if not (PLACE / "installed").exists():
            pins = [f"{name}=={PINS[name]}" for name in ("peft", "accelerate")]
            wanted = ["-e", f"{ROOT}[hf]", *pins, *TOOLS]
            pip = [PYTHON, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
            subprocess.run([*pip, *wanted], check=True)
            (PLACE / "installed").touch()
        self._ini.write_text("[pytest]\n", encoding="utf-8")

    def unpack(self, name: str) -> Path:
        """Brings a project's source archive, and returns where its tests lie."""
        target = PLACE / "suites" / f"{name}-{PINS[name]}"
        if not target.exists():
            archives = PLACE / "archives"
            pip = [PYTHON, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
            pip += ["--no-build-isolation", "-d", archives, f"{name}=={PINS[name]}"]
            subprocess.run(
                [PYTHON, "-m", "pip", "install", "-q", "setuptools", "wheel"], check=True
            )
            subprocess.run(pip, check=True)
            with tarfile.open(archives / f"{name}-{PINS[name]}.tar.gz") as archive:
                archive.extractall(target.parent, filter="data")
            (target / "tests" / "__init__.py").touch()  # archives leave empty files out
        return target

    def join(self, checkout: Path) -> Path:
        """The archive of transformers, with what only the checkout of its repository has."""
        archive, joined = self.unpack("transformers"), PLACE / "suites" / "checkout"
        if not joined.exists():
            for source in (checkout / "tests", checkout / "utils", checkout / "conftest.py"):
                bring = shutil.copytree if source.is_dir() else shutil.copy
                joined.mkdir(exist_ok=True)
                bring(source, joined / source.name)
            shutil.copytree(archive, joined, dirs_exist_ok=True)  # its files fit what is installed
        return joined

    def fill_hub(self, suite: Path, files: Iterable[str]) -> None:
        """Makes the tiny models that these files name, or what lies beside them."""
        sources = {suite / file for file in files} | set((suite / "tests").glob("*.py"))
        command = [PYTHON, HERE / "tiny_hub.py", PLACE / "hub", PLACE / "tiny", *sorted(sources)]
        with (PLACE / "hub.log").open("a", encoding="utf-8") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)

    def run(self, name: str, suite: Path, file: str, attached: bool, only: list[str]) -> Outcome:
        """Runs one file of a suite, again from where it was if the interpreter died of a test."""
        kind = ("warm" if self._warm else "attached") if attached else "plain"
        path = self.results / name / f"{Path(file).stem}.{kind}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return self._rerun(path, suite, file, attached, only)

    def again(self, suite: Path, test: str, attached: bool) -> bool:
        """Whether a single test passes, run alone."""
        path = PLACE / "again.jsonl"
        path.write_text("", encoding="utf-8")
        file = test.partition("::")[0]
        return bool(self._rerun(path, suite, file, attached, [test]).of("passed"))

    def _rerun(
        self, path: Path, suite: Path, file: str, attached: bool, only: list[str]
    ) -> Outcome:
        chosen = path.with_suffix(".only")
        chosen.write_text("\n".join(only), encoding="utf-8")
        outcome = read(path)
        if outcome.ended or (attached and not only):
            return outcome
        command = [PYTHON, "-m", "pytest", "-q", "-p", "flowkv_foreign", "-c", self._ini]
        command += ["--rootdir", suite, "--timeout", str(self._limit_s), "-p", "no:cacheprovider"]
        command += ["--sample", str(self._sample), *(["--attached"] if attached else [])]
        command += [*(["--warm"] if attached and self._warm else [])]
        command += [*(["-k", self._keyword] if self._keyword else [])]
        command += [*(["--only", chosen] if only else []), file]
        places = {
            "PYTHONPATH": HERE,
            "FOREIGN_RESULTS": path,
            "HF_HOME": PLACE / "home",
            "HF_HUB_CACHE": PLACE / "hub",
            "TRANSFORMERS_TINY_MODEL_PATH": PLACE / "tiny",
            "TRITON_CACHE_DIR": PLACE / "triton",
        }
        fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        fixed["RUN_SLOW"] = "1"  # slow with real weights, of which there are none
        for _ in range(100):
            with path.with_suffix(".log").open("a", encoding="utf-8") as log:
                subprocess.run(
                    ["nice", *command],
                    cwd=suite,
                    env=os.environ | {key: str(value) for key, value in places.items()} | fixed,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            outcome = read(path)
            if outcome.ended:
                return outcome
        raise SystemExit(f"{file}: the interpreter died too often, see {path.with_suffix('.log')}")


def read(path: Path) -> Outcome:
    """What a run wrote down. A test that began and has no outcome took the interpreter with it."""
    outcome, begun = Outcome(), ""
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "started" in line:
            if begun:
                outcome.tests[begun] = {"outcome": "crashed", "why": "the interpreter died"}
            begun = line["started"]
        elif "test" in line:
            known = outcome.tests.get(line["test"])
            if known is None or line["outcome"] != "passed":
                outcome.tests[line["test"]] = line
            begun = ""
        else:
            outcome.counts.update(line["counts"])
            outcome.ended = True
    if begun:
        with path.open("a", encoding="utf-8") as more:
            lost = {"test": begun, "outcome": "crashed", "why": "the interpreter died", "s": 0.0}
            more.write(json.dumps(lost) + "\n")
        outcome.tests[begun] = lost
    return outcome


def reason(line: dict[str, str]) -> str:
    """Why a test was skipped, in a word."""
    why = line["why"].lower()
    words = {
        "hub": "skipped: hub|test is slow|internet|network|staging",
        "gpu": "cuda|gpu|accelerator|flash attention|fsdp|tensor parallel|kernels",
        "package": "requires|not installed|not available|bitsandbytes",
    }
    return next((kind for kind, said in words.items() if re.search(said, why)), "other")


@dataclass
class Row:
    """What became of one file, both ways; the `worse` tests fail only with FlowKV.

    Attributes:
        worse: They fail only with FlowKV.
        unsteady: They failed with FlowKV, but also without it when tried again.
    """

    file: str
    plain: Outcome
    attached: Outcome
    worse: list[str]
    unsteady: list[str]
    plain_s: float
    attached_s: float

    @property
    def skipped(self) -> Counter[str]:
        """Tests that did not run, by reason."""
        return Counter(reason(self.plain.tests[test]) for test in self.plain.of("skipped"))

    @property
    def ran(self) -> int:
        """How many tests ran."""
        return len(self.plain.tests) - self.skipped.total()

    def __str__(self) -> str:
        skipped = " ".join(f"{kind} {n}" for kind, n in sorted(self.skipped.items()))
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.attached.counts.items()))
        lines = [
            f"{self.file}: collected {len(self.plain.tests)}, ran {self.ran},"
            f" skipped {self.skipped.total()} ({skipped}); passed {len(self.plain.of('passed'))},"
            f" failed {len(self.plain.of('failed', 'crashed', 'collect-failed'))}; with FlowKV:"
            f" passed {len(self.attached.of('passed'))}, fail only so {len(self.worse)},"
            f" unsteady {len(self.unsteady)}; {counts};"
            f" {self.plain_s:.0f} s, {self.attached_s:.0f} s",
            *(f"    only with FlowKV: {test}" for test in self.worse),
            *(f"    fails by itself at times: {test}" for test in self.unsteady),
        ]
        return "\n".join(lines)


def compare(bench: Bench, name: str, suite: Path, file: str) -> Row:
    """Runs a file both ways; with FlowKV only what passed without."""
    start = time.monotonic()
    plain = bench.run(name, suite, file, attached=False, only=[])
    middle = time.monotonic()
    passed = plain.of("passed")
    attached = bench.run(name, suite, file, attached=True, only=passed)
    end = time.monotonic()
    fine = set(attached.of("passed"))
    worse = [test for test in passed if test not in fine]
    unsteady = [
        test
        for test in worse
        if not all(bench.again(suite, test, attached=False) for _ in range(RETRIES))
    ]
    worse = [test for test in worse if test not in unsteady]
    return Row(file, plain, attached, worse, unsteady, middle - start, end - middle)


def main() -> None:
    """Runs what is asked for and exits 1 if a test fails only with FlowKV."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign", description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[[], "peft", "accelerate", "checkout"])
    parser.add_argument("--tests", type=Path, help="checkout of transformers' repository")
    parser.add_argument("--files", default="*", help="pattern for names of test files")
    parser.add_argument("-k", dest="keyword", default="", help="pytest's -k")
    parser.add_argument("--sample", type=int, default=1, help="run one of so many tests")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one test")
    parser.add_argument(
        "--warm", action="store_true", help="with FlowKV, generate twice: from known pages"
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    given = parser.parse_args()
    bench = Bench(given.keyword, given.sample, given.timeout, warm=given.warm)
    if given.fresh:
        shutil.rmtree(bench.results, ignore_errors=True)
    bench.install()
    names = given.suites or ["peft", "accelerate", *(["checkout"] if given.tests else [])]
    places = {
        name: bench.join(given.tests.resolve()) if name == "checkout" else bench.unpack(name)
        for name in names
    }
    failed, ran, collected, counts = 0, 0, 0, Counter[str]()
    for name, suite in places.items():
        print(f"== {name} ({suite.name})", flush=True)
        files = [
            file
            for file in SUITES[name].files
            if fnmatch(Path(file).stem, given.files) and (suite / file).exists()
        ]
        bench.fill_hub(suite, files)
        for file in files:
            row = compare(bench, name, suite, file)
            print(row, flush=True)
            failed += len(row.worse)
            counts += row.attached.counts
            if file in SUITES[name].causal:
                ran, collected = ran + row.ran, collected + len(row.plain.tests)
    print(f"causal-model tests: {ran} of {collected} ran ({ran / max(collected, 1):.0%})")
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    print(f"fail only with FlowKV: {failed}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
