"""`python -m tests.foreign [SUITE...]`: no test of others may fail that passes without FlowKV.

Downloads the source archives of PEFT, accelerate and transformers, makes an environment of its own
with FlowKV from this tree, and runs their tests twice: as they are, and with FlowKV attached to
every model that they make. What passed the first time must pass the second time.

`--tests DIR` adds a checkout of transformers' repository (its tests of generation, caches and
models are in no archive). They run with the release nearest to the checkout, in an environment of
their own. Everything lies in `.venv-foreign`, and uses the packages of the running environment.
Results are kept, so that a run that was stopped goes on where it was (`--fresh` begins anew).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
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
LEAST = (5, 17, 0)
"""Oldest release of transformers that FlowKV supports."""
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


def modeling(names: str) -> tuple[str, ...]:
    """Paths of the tests of models out of the names of their folders."""
    return tuple(f"tests/models/{name}/test_modeling_{name}.py" for name in names.split())


MODELS = modeling("llama qwen2 qwen3 mistral gemma2 gemma3 gpt2")
KINDS = modeling(
    "qwen3_next qwen3_5 falcon_h1 jamba bamba lfm2 mamba2 zamba2 nemotron_h granitemoehybrid"
    " olmo_hybrid recurrent_gemma minimax deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4"
    " glm_moe_dsa minimax_m3_vl longcat_flash axk1 axk2 gpt_oss gemma3n gemma4 phi3 mixtral cohere2"
    " exaone4 llama4 qwen3_moe t5 bart whisper mllama qwen2_5_vl qwen2_vl qwen3_vl llava"
)
"""One model folder or more of each kind of cache: hybrid, indexed, latent, windowed, crossed."""
GENERATION = tests("utils candidate_generator continuous_batching", "tests/generation/test_")
TALKS = (
    "(generate or cache or beam or decoding or past_key or left_padding or batching_equivalence"
    " or logits_to_keep or recurrent or 4d_attention or inputs_embeds or mtp or position_ids"
    " or determinism) and not export and not compil and not flash and not fa2 and not fa3"
    " and not fa4 and not inference and not pipeline and not fsdp and not tensor_parallel"
    " and not offload"
)
"""What of `KINDS` is run: tests that generate or hold caches. Of `MODELS`, all tests are."""
INTERNAL: dict[str, str] = {}
"""Tests that may fail with FlowKV only, as patterns of node ids: what of the native cache they see.

They are reported by name. What a model answers is never such a reason.
"""
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
        (*MODELS, "tests/utils/test_cache_utils.py", *GENERATION, *KINDS),
        (*MODELS, *KINDS, "tests/utils/test_cache_utils.py"),
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
        release: The release of transformers; `PINS` has the one of the other suites.
        keyword: pytest's `-k`, "" for all tests.
        sample: One of so many tests is run, chosen by its name.
        limit_s: A test that takes longer has failed.
        warm: With FlowKV, prompts are generated twice, so that answers come of known pages.
    """

    def __init__(
        self, release: str, keyword: str, sample: int, limit_s: int, *, warm: bool
    ) -> None:
        self._keyword, self._sample, self._limit_s = keyword, sample, limit_s
        self._place = PLACE if release == PINS["transformers"] else PLACE / release
        self._python, self._pins = self._place / "bin" / "python", PINS | {"transformers": release}
        self.results = self._place / "results" / f"{sample}-{re.sub(r'[^a-z0-9]+', '-', keyword)}"
        self._warm = warm
        self._ini = self._place / "pytest.ini"

    def install(self) -> None:
        """Makes the environment with FlowKV from this tree in it."""
        if not self._python.exists():
            subprocess.run([sys.executable, "-m", "venv", self._place], check=True)
            library = next(self._place.glob("lib/python*/site-packages"))
            (library / "running.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        if not (self._place / "installed").exists():
            pins = [f"{name}=={version}" for name, version in self._pins.items()]
            wanted = ["-e", f"{ROOT}[hf]", *pins, *TOOLS]
            fixed = (ROOT / "constraints.txt").read_text(encoding="utf-8")
            if self._place != PLACE:  # another release needs other packages beside it
                fixed = fixed.partition("# [hf]")[0]
            (self._place / "constraints.txt").write_text(fixed, encoding="utf-8")
            pip = [
                *(self._python, "-m", "pip", "install", "-q", "-c"),
                self._place / "constraints.txt",
            ]
            subprocess.run([*pip, *wanted], check=True)
            (self._place / "installed").touch()
        self._ini.write_text("[pytest]\n", encoding="utf-8")

    def unpack(self, name: str) -> Path:
        """Brings a project's source archive, and returns where its tests lie."""
        target = self._place / "suites" / f"{name}-{self._pins[name]}"
        if not target.exists():
            archives = self._place / "archives"
            pip = [self._python, "-m", "pip"]
            download = [*pip, "download", "-q", "--no-deps", "--no-binary", ":all:"]
            download += ["--no-build-isolation", "-d", archives, f"{name}=={self._pins[name]}"]
            subprocess.run([*pip, "install", "-q", "setuptools", "wheel"], check=True)
            subprocess.run(download, check=True)
            with tarfile.open(archives / f"{name}-{self._pins[name]}.tar.gz") as archive:
                archive.extractall(target.parent, filter="data")
            (target / "tests" / "__init__.py").touch()  # archives leave empty files out
        return target

    def join(self, checkout: Path) -> Path:
        """The archive of transformers, with what only the checkout of its repository has."""
        archive, joined = self.unpack("transformers"), self._place / "suites" / "checkout"
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
        places = self._place / "hub", self._place / "tiny"
        command = [self._python, HERE / "tiny_hub.py", *places, *sorted(sources)]
        with (self._place / "hub.log").open("a", encoding="utf-8") as log:
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
        path = self._place / "again.jsonl"
        path.write_text("", encoding="utf-8")
        file = test.partition("::")[0]
        return bool(self._rerun(path, suite, file, attached, [test]).of("passed"))

    def _rerun(
        self, path: Path, suite: Path, file: str, attached: bool, only: list[str]
    ) -> Outcome:
        chosen = path.with_suffix(".only")
        chosen.write_text("\n".join(only), encoding="utf-8")
        go_on(path)
        outcome = read(path)
        if outcome.ended or (attached and not only):
            return outcome
        command = [self._python, "-m", "pytest", "-q", "-p", "flowkv_foreign", "-c", self._ini]
        command += ["--rootdir", suite, "--timeout", str(self._limit_s), "-p", "no:cacheprovider"]
        command += ["--sample", str(self._sample), *(["--attached"] if attached else [])]
        command += [*(["--warm"] if attached and self._warm else [])]
        words = [TALKS] if file in KINDS else []
        keyword = " and ".join(words + ([f"({self._keyword})"] if self._keyword else []))
        command += [*(["-k", keyword] if keyword else [])]
        command += [*(["--only", chosen] if only else []), file]
        places = {
            "PYTHONPATH": HERE,
            "FOREIGN_RESULTS": path,
            "HF_HOME": self._place / "home",
            "HF_HUB_CACHE": self._place / "hub",
            "TRANSFORMERS_TINY_MODEL_PATH": self._place / "tiny",
            "TRITON_CACHE_DIR": self._place / "triton",
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


def go_on(path: Path) -> None:
    """Makes the test in which a run was stopped one that has not begun."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and "started" in json.loads(lines[-1]):
        path.write_text("".join(lines[:-1]), encoding="utf-8")


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


def internal(test: str) -> str:
    """Why a test may fail with FlowKV only, "" if it may not."""
    return next((why for pattern, why in INTERNAL.items() if fnmatch(test, pattern)), "")


def release_of(checkout: Path) -> str:
    """The release of transformers nearest to a checkout that FlowKV supports."""
    found = re.search(r'version="(\d+)\.(\d+)\.(\d+)', (checkout / "setup.py").read_text())
    if found is None:
        raise SystemExit(f"{checkout}/setup.py names no version; give --transformers")
    return ".".join(map(str, max(LEAST, tuple(map(int, found.groups())))))


@dataclass
class Row:
    """What became of one file, both ways.

    Attributes:
        worse: They fail only with FlowKV.
        known: So do these, which look at what the native cache keeps (`INTERNAL`).
        unsteady: They failed with FlowKV, but also without it when tried again.
    """

    file: str
    plain: Outcome
    attached: Outcome
    worse: list[str]
    known: list[str]
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
            f" passed {len(self.attached.of('passed'))}, new failures {len(self.worse)},"
            f" of internals {len(self.known)}, unsteady {len(self.unsteady)};"
            f" {counts or 'nothing was attached'};"
            f" {self.plain_s:.0f} s, {self.attached_s:.0f} s",
            *(f"    only with FlowKV: {test}" for test in self.worse),
            *(f"    {internal(test)}: {test}" for test in self.known),
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
    known = [test for test in worse if test not in unsteady and internal(test)]
    worse = [test for test in worse if test not in unsteady and test not in known]
    return Row(file, plain, attached, worse, known, unsteady, middle - start, end - middle)


def main() -> None:
    """Runs what is asked for and exits 1 if a test fails only with FlowKV."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign", description=__doc__)
    parser.add_argument("suites", nargs="*", choices=[[], "peft", "accelerate", "checkout"])
    parser.add_argument("--tests", type=Path, help="checkout of transformers' repository")
    parser.add_argument("--transformers", help="release for the checkout's tests, if not nearest")
    parser.add_argument("--files", default="*", help="pattern for names of test files")
    parser.add_argument("-k", dest="keyword", default="", help="pytest's -k")
    parser.add_argument("--sample", type=int, default=1, help="run one of so many tests")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one test")
    parser.add_argument(
        "--warm", action="store_true", help="with FlowKV, generate twice: from known pages"
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    given = parser.parse_args()
    names = given.suites or ["peft", "accelerate", *(["checkout"] if given.tests else [])]
    if "checkout" in names and not given.tests:
        parser.error("the suite `checkout` needs --tests DIR")
    total, counts, failed, ran, collected = Counter[str](), Counter[str](), 0, 0, 0
    for name in names:
        release = PINS["transformers"]
        if name == "checkout":
            release = given.transformers or release_of(given.tests)
        bench = Bench(release, given.keyword, given.sample, given.timeout, warm=given.warm)
        if given.fresh:
            shutil.rmtree(bench.results / name, ignore_errors=True)
        bench.install()
        checkout = name == "checkout"
        suite = bench.join(given.tests.resolve()) if checkout else bench.unpack(name)
        print(f"== {name} ({suite.name}, transformers {release})", flush=True)
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
            total["passed without FlowKV"] += len(row.plain.of("passed"))
            total["passed with FlowKV"] += len(row.attached.of("passed"))
            total["of internals"] += len(row.known)
            total["unsteady"] += len(row.unsteady)
            if file in SUITES[name].causal:
                ran, collected = ran + row.ran, collected + len(row.plain.tests)
    print(f"causal-model tests: {ran} of {collected} ran ({ran / max(collected, 1):.0%})")
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    print(", ".join(f"{n} {what}" for what, n in total.items()))
    print(f"new failures, only with FlowKV: {failed}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
