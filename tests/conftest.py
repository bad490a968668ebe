"""Fixtures of every test: fixed seeds, poisoned empty tensors, one torch thread per worker."""

from __future__ import annotations

import functools
import gc
import os
import random
import types
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from tests.audit import watch
from tests.cache.fakes import load_everything
from tests.inside import computation

TESTS = Path(__file__).resolve().parent
SECONDS = TESTS / "seconds.txt"
BESIDE = 250.0, 160.0, 100.0
"""Processor seconds of what .ci/run runs beside each third of the thorough tests."""
POISON_LIMIT_BYTES = 64 << 20
QUEUED = pytest.StashKey[object]()

# Files of tests that walk a large product (models, mutants, machines, whole tools) of what others
# show on a few, that measure, or whose subject stands beside what serves a model: `python -m tests`
# leaves them to `--all`, everybody else runs them as ever.
THOROUGH = """
bench/test_blend.py bench/test_overflow.py bench/test_perplexity.py bench/test_policy.py
bench/test_quality.py bench/test_restarts.py bench/test_restore_protocol.py
bench/test_restore_table.py bench/test_serve_load.py bench/test_serve_measures.py
bench/test_serve_rows.py bench/test_sparsified.py bench/test_sparsify.py
cache/test_adoption.py cache/test_agreement.py
cache/test_flat.py cache/test_handover.py cache/test_machine.py
cache/test_overflow.py cache/test_recording.py cache/test_regret.py cache/test_restart.py
cache/test_sparsify.py
connect/test_keeper.py connect/test_kill.py
engine/test_invariant.py engine/test_pressure_machine.py
hooks/test_architectures.py hooks/test_audit.py hooks/test_blend.py hooks/test_codecs.py
tensors/test_embedding.py hooks/test_encoder_decoder.py hooks/test_engine_rows.py
hooks/test_foreign_threads.py hooks/test_indexed.py
tensors/test_memo.py hooks/test_modes.py hooks/test_overflow.py hooks/test_packed.py
hooks/test_restore.py hooks/test_restore_lost.py hooks/test_restore_nested.py
hooks/test_restore_recurrent.py hooks/test_sampling.py hooks/test_sparsify.py
tensors/test_weights.py
kernels/test_codegen.py kernels/test_digits.py kernels/test_mixed.py
kernels/test_triton_interpreter.py
policy/restore/test_baselines.py policy/restore/test_mutants.py policy/scheduling/test_mutants.py
policy/test_against_reference.py policy/test_arc.py policy/test_by_score.py
policy/test_cost_aware.py policy/test_hazard_reference.py policy/test_hedge.py
policy/test_markov.py policy/test_mutants.py policy/test_optimum.py
sim/restore/test_headline.py sim/test_rivals.py
test_artifacts.py test_benchmarks.py test_demo.py
tiers/remote/test_redis_faults.py tiers/test_check_tier.py tiers/test_disk_engines.py
tiers/test_disk_home.py tiers/test_disk_kill.py tiers/test_disk_power.py tiers/test_faults.py
tiers/test_interleavings.py tiers/test_simulation.py
""".split()
FILES = frozenset(TESTS / name for name in THOROUGH)

# Tests with many cases of one kind: a fourth of the cases is fast, the others are thorough.
SAMPLED = """
cache/test_audit.py::test_encoded_pages_are_held_to_what_their_codec_may_lose
cache/test_codecs.py::test_a_reader_takes_what_is_not_lossier_than_itself
cache/test_coherency.py::test_another_cache_does_not_answer_from_its_pages
cache/test_pinned.py::test_a_copy_that_goes_wrong_is_never_served
cache/test_pinned.py::test_nothing_wrong_comes_from_a_disk
cache/test_pinned.py::test_nothing_wrong_comes_from_pinned_memory
hooks/test_asked_again.py::test_pages_that_are_lost_on_their_way
hooks/test_edits.py::test_an_edit_takes_effect
hooks/test_foreign.py::test_within_a_process_and_over_a_directory
hooks/test_graphs.py::test_replays_answer_as_the_model
hooks/test_identity.py::test_an_edit_after_attach_is_never_answered_with_what_was
hooks/test_identity_contents.py::test_an_edit_of_a_module_is_another_name
hooks/test_identity_contents.py::test_what_a_value_holds_is_in_the_name
hooks/test_identity_writes.py::test_a_forward_that_counts_makes_its_model_foreign
hooks/test_identity_writes.py::test_frequencies_of_an_encoding_by_length
hooks/test_never_wrong.py::test_verify_passes
hooks/test_press.py::test_the_answer_is_the_press_s_own
hooks/test_recurrent.py::test_half_precision_hides_no_lost_convolution
hooks/test_skipped.py::test_layers_that_are_skipped_and_come_back
kernels/test_codecs.py::test_conformance
kernels/test_dots.py::test_dots
kernels/test_rope.py::test_latents_keep_their_values
tiers/test_disk_faults.py::test_F5_any_operation_may_fail
tiers/test_disk_hostile.py::test_one_bad_load_never_fails_its_batch
""".split()
ONE_IN = 4

# Files of tests that count the pages which are reused: there, what fills none is not. Others, the
# machine of calls and every architecture above all, reuse it.
WHOLE_PAGES = """
cache/test_mover.py cache/test_pinned.py cache/test_properties.py cache/test_quotas.py
cache/test_recording.py cache/test_regret.py cache/test_restoration.py
cache/test_restoration_edges.py cache/test_restore.py cache/test_sharing.py
cache/test_snapshots.py cache/test_sparsify.py cache/test_states.py cache/test_steps.py
cache/test_store.py cache/test_storing.py cache/test_swap.py cache/test_visits.py
hooks/test_attach.py hooks/test_codecs.py hooks/test_edits.py hooks/test_encoder_decoder.py
hooks/test_identity.py hooks/test_identity_contents.py hooks/test_identity_writes.py
hooks/test_latent.py hooks/test_modes.py hooks/test_offload.py hooks/test_packed.py
hooks/test_restore.py hooks/test_restore_nested.py hooks/test_tried_again.py
""".split()

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=25,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("deep", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")  # another one: pytest --hypothesis-profile deep


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a maker of uninitialised tensors so that its floats are NaN, never lucky zeros."""

    limit = POISON_LIMIT_BYTES

    @functools.wraps(make)
    def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if (
            tensor.is_floating_point()
            and tensor.device.type != "meta"
            and tensor.element_size() > 0
            and tensor.nbytes <= limit
            and tensor.dtype != torch.float4_e2m1fn_x2  # fill_ does not know it
        ):
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return of_torch(wrapper)


def of_torch(patch: types.FunctionType) -> types.FunctionType:
    """A patch of the tests' own that counts as torch's, so that no model is foreign by it."""
    space, parts = vars(torch.functional), (patch.__defaults__, patch.__closure__)
    made = types.FunctionType(patch.__code__, space, patch.__name__, *parts)
    computation._GENUINE[id(made.__code__)] = made.__code__
    return functools.update_wrapper(made, patch)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small products on many threads wait for each other where there is other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Failures:
    """Shows each failure when it comes; pytest shows them all at its end, once more."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        screen = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and screen is not None:  # workers of xdist have none
            screen.ensure_newline()
            screen.write_line(f"FAILED {report.nodeid}")
            screen.write_line(report.longreprtext)


def pytest_configure(config: pytest.Config) -> None:
    """Tame the thread pools before any model runs: workers share the machine's few cores."""
    watch()
    config.pluginmanager.register(Failures(config))
    if config.getoption("--seconds"):
        config.pluginmanager.register(Seconds())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes that tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part 2/3`: one of three parts that together are all tests; `--queued`: as on a GPU."""
    parser.addoption("--part", default="1/1", help="only this part of the tests, such as 2/3")
    parser.addoption("--queued", action="store_true", help="run the code for GPUs on the CPU")
    parser.addoption("--seconds", action="store_true", help="write what files take into a table")


def read_seconds() -> dict[str, list[float]]:
    """Return processor seconds of files' fast and of their thorough tests."""
    rows = (line.split() for line in SECONDS.read_text().splitlines()[1:])
    return {path: [float(fast), float(thorough)] for fast, thorough, path in rows}


@functools.cache
def parts_of(parts: int, thorough: bool, among: tuple[str, ...]) -> dict[Path, int]:
    """Share the measured files below some paths among parts that take equally long."""
    thirds = thorough and parts == len(BESIDE)
    full, found = [*BESIDE] if thirds else [0.0] * parts, dict[Path, int]()
    for path, row in sorted(read_seconds().items(), key=lambda one: (-one[1][thorough], one[0])):
        if row[thorough] and any(Path(path).is_relative_to(one) for one in among):
            least = full.index(min(full))
            full[least] += row[thorough]
            found[TESTS / path] = 1 + least
    return found


def part_of(path: Path, config: pytest.Config) -> int | None:
    """Return which part a measured file is in, from 1 on: the same one in the run of each part."""
    parts, thorough = config.getoption("--part").partition("/")[2], "and thorough"
    words = {word.partition("::")[0].removeprefix("tests").strip("/") for word in config.args}
    found = parts_of(int(parts), config.option.markexpr.endswith(thorough), tuple(sorted(words)))
    return found.get(path)


def drawn_part_of(item: pytest.Item, parts: int) -> int:
    """Return which part a test of any other file is in, by its name.

    Tests that share what is made once in their module are in one, so that it is made once.
    """
    path = item.nodeid.partition("::")[0]
    made = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    shared = any(one[-1].scope != "function" and one[-1].baseid == path for one in made)
    return 1 + zlib.crc32((path if shared else item.nodeid).encode()) % parts


class Seconds:
    """Write the processor time of each file's tests, and of processes they wait for, to a table.

    Fast and thorough tests have columns of their own; one that did not run keeps its seconds.
    """

    def __init__(self) -> None:
        self.took = dict[tuple[str, bool], float]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = os.times()
        result = yield
        key = str(item.path.relative_to(TESTS)), "thorough" in item.keywords
        self.took[key] = self.took.get(key, 0.0) + sum(os.times()[:4]) - sum(before[:4])
        return result

    def pytest_sessionfinish(self) -> None:
        head, rows = SECONDS.read_text().splitlines()[0], read_seconds()
        for (path, column), took in self.took.items():
            rows.setdefault(path, [0.0, 0.0])[column] = took
        lines = [
            f"{fast:.0f} {thorough:.0f} {path}"
            for path, (fast, thorough) in sorted(rows.items())
            if (TESTS / path).exists() and max(fast, thorough) >= 1
        ]
        SECONDS.write_text("\n".join([head, *lines, ""]))


def left_out(nodeid: str) -> bool:
    """Whether a test is a case of many that is not among the fast ones: always the same ones."""
    function = nodeid.partition("[")[0].removeprefix("tests/")
    return function in SAMPLED and zlib.crc32(nodeid.encode()) % ONE_IN != 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread of another part, or of which `-m` would choose no test."""
    chosen, listed = config.option.markexpr, collection_path in FILES
    part = config.getoption("--part").partition("/")[0]
    if part_of(collection_path, config) not in (None, int(part)):
        return True
    if collection_path.name.startswith("test_") and not listed and chosen.endswith("and thorough"):
        sampled = any(TESTS / name.partition("::")[0] == collection_path for name in SAMPLED)
        return (not sampled and "thorough" not in collection_path.read_text()) or None
    return True if listed and chosen.endswith("and not thorough") else None


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep our part, mark the thorough tests; skip what this device cannot do."""
    part, parts = map(int, config.getoption("--part").split("/"))
    if parts > 1:
        its = {item: part_of(item.path, config) or drawn_part_of(item, parts) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if its[item] != part])
        items[:] = [item for item in items if its[item] == part]
    for item in items:
        if item.path in FILES or left_out(item.nodeid):
            item.add_marker("thorough")
    skips = dict[str, str]()
    if not torch.cuda.is_available():
        skips["gpu"] = "needs a CUDA device, and torch sees none on this machine"
    if config.getoption("--queued"):
        skips["at_once"] = "of what a CPU does at once, or with a device of its own"
    for item in items:
        # Not keywords: those have the names of folders, also above the project.
        for word in skips.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=skips[word]))


def _settle() -> None:
    """Take what is alive out of what the collector looks at: a collection costs seconds else."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Look for garbage only in what tests make."""
    _settle()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Look for garbage only in what this file of tests makes: libraries load more as they go."""
    if nextitem is not None and nextitem.path != item.path:
        _settle()


@pytest.fixture(scope="session", autouse=True)
def nan_poison() -> object:
    """Make reading memory that nobody wrote show up as NaN in the answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        patch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        yield


@pytest.fixture(autouse=True)
def whole_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what fills no page out of files that count pages."""
    if request.path.is_relative_to(TESTS) and str(request.path.relative_to(TESTS)) in WHOLE_PAGES:
        monkeypatch.setattr("flowkv.cache.seal.Tails.best_match", lambda *_: None)
        monkeypatch.setattr("flowkv.cache.seal.Tails.keep", lambda *_: None)
        monkeypatch.setattr("flowkv.cache.seal.Tails.save", lambda *_: None)
        monkeypatch.setattr("flowkv.cache.restore.PrefixMatcher.behind", lambda *_: [])


@pytest.fixture(scope="session", autouse=True)
def queued(request: pytest.FixtureRequest) -> object:
    """With `--queued`, treat the CPU as a GPU, for as long as finalizers may run."""
    if not request.config.getoption("--queued"):
        return None
    from tests.queued import like_a_gpu

    device = like_a_gpu()
    request.config.stash[QUEUED] = device
    return device.__enter__()


@pytest.fixture(autouse=True)
def copies(queued: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--queued`, fail where the source of a copy to the device changed too early."""
    if queued:  # what is late is the same whatever ran before
        queued.late.seed(request.node.nodeid)
    yield
    if queued and queued.faults:
        queued.faults.clear()
        pytest.fail("memory changed before the copy from it was over")


@contextmanager
def examples(few: int) -> Iterator[None]:
    """Draw so many examples, unless many were asked for."""
    name, profile = hypothesis.settings.get_current_profile_name(), hypothesis.settings()
    few = max(few, profile.max_examples // 4)
    hypothesis.settings.register_profile("brief", profile, max_examples=few)
    hypothesis.settings.load_profile("brief")
    yield
    hypothesis.settings.load_profile(name)


@pytest.fixture
def briefly() -> Iterator[None]:
    """Draw as few examples as find every wrong tier of tests/tiers/mutants.py."""
    with examples(16):
        yield


@pytest.fixture
def all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store and load everything, for tests that count it: a slow tier's pages are computed."""
    load_everything(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def policies_choose() -> object:
    """Have caches compile their policies where they are called: what is given up is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowkv.policy.warming._COMPILED.loaded", lambda name: True)
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
