"""A pytest plugin that attaches FlowKV to every transformers model that a foreign test makes.

Loaded by name from its own directory (`-p flowkv_foreign`), as suites have a package `tests` too.
Every outcome is a line of JSON in `FOREIGN_RESULTS`; a test that has one is not run again, so that
a run goes on after one that crashed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

FEW, LONGER = 7, 4
"""Tokens of most prompts in transformers' tests; how often prompts are repeated, in both runs."""

# What a model that cannot be had raises, and what such an error is turned into on the way.
AWAY = {
    *("ConnectError", "LocalEntryNotFoundError", "OfflineModeIsEnabled"),
    *("RepositoryNotFoundError", "RemoteEntryNotFoundError"),
}
STATEFUL = {"past_key_values", "streamer", "logits_processor", "stopping_criteria"}
STATEFUL |= {"assistant_model", "custom_generate", "cache_implementation"}
"""Arguments of `generate` that may not be used twice."""

AWAY_SAYS = (
    *("couldn't connect to 'http", "Couldn't reach", "is not cached locally"),
    *("offline mode is enabled", "in offline mode", "outgoing traffic has been disabled"),
    "Can't find 'adapter_config.json'",
    *("is not a local folder and is not a valid model identifier", "Connection refused"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The runner's own words."""
    group = parser.getgroup("foreign")
    group.addoption("--attached", action="store_true", help="attach FlowKV to every model")
    group.addoption("--warm", action="store_true", help="generate twice, answer from known pages")
    group.addoption("--only", help="file with the node ids to run, one a line")
    group.addoption("--sample", type=int, default=1, help="run one of so many tests")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the record, and hangs FlowKV on what makes models."""
    sys.meta_path.append(Missing())  # after all who may know better
    config.pluginmanager.register(Record(Path(os.environ["FOREIGN_RESULTS"])), "foreign-record")
    if config.getoption("--attached"):
        attached = Attached(warm=config.getoption("--warm"))
        config.pluginmanager.register(attached, "foreign-attached")


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of a suite that neither archive nor checkout has; all that is asked of them is empty.

    An archive leaves directories out that its own files import, such as the mixin of generation.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name.startswith("tests.") else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = self._make  # type: ignore[method-assign]

    @staticmethod
    def _make(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def new(cls: type, *args: Any, **options: Any) -> Any:
            decorates = cls is made and args and callable(args[0])
            return args[0] if decorates else object.__new__(cls)

        made = type(name, (), {"__new__": new})
        return made


class Record:
    """Chooses the tests and writes down what becomes of each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        every = config.getoption("--sample")
        only, done = config.getoption("--only"), set()
        with self._path.open(encoding="utf-8") as lines:
            done = {json.loads(line).get("test") for line in lines}
        chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % every == 0]
        if only:
            wanted = set(Path(only).read_text(encoding="utf-8").splitlines())
            chosen = [item for item in chosen if item.nodeid in wanted]
        items[:] = [item for item in chosen if item.nodeid not in done]
        for made in {item.cls for item in items if getattr(item, "cls", None) is not None}:
            lengthen(made)
        for module in {item.module for item in items if hasattr(item, "module")}:
            for value in [*vars(module).values()]:
                for tester in value.__mro__ if isinstance(value, type) else ():
                    if tester.__name__.endswith("Tester"):
                        lengthen_tester(tester)
        for name, module in list(sys.modules.items()):
            if name.endswith("testing_utils") and hasattr(module, "_HUB_MODEL_ACCESSES"):
                module._HUB_MODEL_ACCESSES = Everything()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(started=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: Any) -> Iterator[None]:
        report = yield
        error = call.excinfo.value if call.excinfo is not None else None
        if report.failed and is_away(error):
            report.outcome = "skipped"
            report.longrepr = (str(report.fspath), 0, "Skipped: hub")
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if type(report) is pytest.TestReport and (report.when == "call" or not report.passed):
            reason = ""
            if report.skipped and isinstance(report.longrepr, tuple):
                reason = report.longrepr[2]
            elif report.failed:
                reason = str(report.longrepr)[-6000:]
            outcome = "passed" if hasattr(report, "wasxfail") else report.outcome
            self.write(test=report.nodeid, outcome=outcome, why=reason, s=report.duration)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        attached = session.config.pluginmanager.get_plugin("foreign-attached")
        self.write(counts=attached.counted() if attached is not None else {})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or (report.skipped and report.nodeid):
            why = str(report.longrepr)[-2000:]
            self.write(test=report.nodeid, outcome=f"collect-{report.outcome}", why=why, s=0.0)


def lengthen(tests: type) -> None:
    """Repeats the few tokens that a class of tests uses as its prompt, so that they fill pages."""
    prepare = vars(tests).get("prepare_inputs_for_testing")
    if prepare is not None:

        @functools.wraps(prepare)
        def longer(*args: Any) -> Any:
            given = prepare(*args)
            if "input_ids" in given:
                given = {name: tokens.repeat(1, LONGER) for name, tokens in given.items()}
            return given

        tests.prepare_inputs_for_testing = longer  # type: ignore[attr-defined]
    given_inputs = getattr(tests, "prepare_config_and_inputs_for_generate", None)
    if given_inputs is not None and not hasattr(given_inputs, "_lengthened"):

        @functools.wraps(given_inputs)
        def shown(*args: Any, **options: Any) -> Any:
            config, given = given_inputs(*args, **options)
            return config, without_gaps(given)

        shown._lengthened = True  # type: ignore[attr-defined]
        tests.prepare_config_and_inputs_for_generate = shown  # type: ignore[attr-defined]


def without_gaps(given: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a test of `generate` with no token masked.

    Most testers mask at random or pad on the right, which `generate` warns of and no cache serves.
    """
    words, mask = given.get("input_ids"), given.get("attention_mask")
    if words is None or mask is None or mask.shape != words.shape:
        return given
    return given | {"attention_mask": mask.new_ones(mask.shape)}


def lengthen_tester(tester: type) -> None:
    """Makes the inputs of a class that makes them longer, where their length was not chosen."""
    init = vars(tester).get("__init__")
    if init is None or hasattr(init, "_lengthened"):
        return
    taken = inspect.signature(init)
    known = taken.parameters.get("seq_length")
    if known is not None and known.default != FEW:
        return

    @functools.wraps(init)
    def begin(self: Any, *args: Any, **options: Any) -> None:
        chosen = "seq_length" in options
        if known is not None and "seq_length" not in taken.bind_partial(self, *args).arguments:
            options.setdefault("seq_length", FEW * LONGER)
        init(self, *args, **options)
        if known is None and not chosen and getattr(self, "seq_length", None) == FEW:
            self.seq_length *= LONGER

    begin._lengthened = True  # type: ignore[attr-defined]
    tester.__init__ = begin  # type: ignore[misc]


class Everything(dict[str, int]):
    """For `hub_online_once` of PEFT: all models were fetched before, nothing goes online."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> int:
        return 0


def is_away(error: BaseException | None) -> bool:
    """Whether a test failed as something of the hub is not on this machine."""
    while error is not None:
        if type(error).__name__ in AWAY or any(words in str(error) for words in AWAY_SAYS):
            return True
        error = error.__cause__ or error.__context__
    return False


def of_transformers(patch: Any) -> Any:
    """Return a patch that counts as transformers' own: a model that it is part of has a name."""
    from transformers import modeling_utils

    from flowkv.naming import computation

    space, parts = vars(modeling_utils), (patch.__defaults__, patch.__closure__)
    made = FunctionType(patch.__code__, space, patch.__name__, *parts)
    computation._GENUINE[id(made.__code__)] = made.__code__
    return functools.update_wrapper(made, patch)


class Attached:
    """Attaches FlowKV at the end of the making of each outermost model, and counts.

    Args:
        warm: What is generated of a prompt alone is generated twice, the second answer is given:
            it goes on from the pages of the first.

    Attributes:
        counts: Models by what became of them, forwards over pages, tokens seen and reused.
    """

    __module__ = "flowkv.foreign"  # what it holds is part of no model, like a cache

    def __init__(self, *, warm: bool) -> None:
        import transformers

        from flowkv.hooks.huggingface.door import ForwardHook

        self.counts: Counter[str] = Counter()
        self._making = threading.local()
        self._kvs: list[tuple[weakref.ref[Any], Any]] = []
        model = transformers.PreTrainedModel
        model.__init_subclass__ = classmethod(self._wrap_subclass(model.__init_subclass__.__func__))
        loading = model.from_pretrained.__func__
        model.from_pretrained = classmethod(self._wrap_making(loading))
        ForwardHook.after = self._count_forwards(ForwardHook.after)
        if warm:
            mixin = transformers.GenerationMixin
            mixin.generate = self._wrap_generate(mixin.generate)

    def _wrap_subclass(self, known: Callable[..., None]) -> Callable[..., None]:
        def init_subclass(cls: Any, **options: Any) -> None:
            known(cls, **options)
            if "__init__" in vars(cls):
                cls.__init__ = self._wrap_init(cls.__init__)

        return of_transformers(init_subclass)

    def _wrap_init(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def made(model: Any, *args: Any, **options: Any) -> None:
            with self._inside() as outermost:
                init(model, *args, **options)
            if outermost:
                self.attach(model)

        return of_transformers(made)

    def _wrap_making(self, loading: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loading)
        def loaded(cls: Any, *args: Any, **options: Any) -> Any:
            with self._inside() as outermost:
                model = loading(cls, *args, **options)
            if outermost:
                self.attach(model[0] if isinstance(model, tuple) else model)
            return model

        return of_transformers(loaded)

    def _wrap_generate(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        stateful = STATEFUL

        @functools.wraps(generate)
        def again(model: Any, *args: Any, **options: Any) -> Any:
            import torch

            alone = not (options.keys() & stateful) and len(args) < 3
            if alone and not model.training:
                state = torch.get_rng_state()
                generate(model, *args, **options)
                torch.set_rng_state(state)
                self.counts["generated twice"] += 1
            return generate(model, *args, **options)

        return of_transformers(again)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[bool]:
        outermost = not getattr(self._making, "on", False)
        self._making.on = True
        try:
            yield outermost
        finally:
            if outermost:
                self._making.on = False

    def attach(self, model: Any) -> None:
        """Gives one model a cache of small pages; what it raises is the test's failure."""
        import flowkv

        if any(parameter.is_meta for parameter in model.parameters()):
            self.counts["models without weights"] += 1
            return
        with self._inside():
            kv = flowkv.attach(model, gpu="16MiB", page_size=8)
        self.counts["models attached" if kv.geometry is not None else "models refused"] += 1
        self._kvs.append((weakref.ref(model), kv))

    def _count_forwards(self, after: Callable[..., None]) -> Callable[..., None]:
        from flowkv.hooks.huggingface.cache import PagedCache

        counts = self.counts

        @functools.wraps(after)
        def counted(door: Any, module: Any, args: Any, given: dict[str, Any], output: Any) -> None:
            cache = given.get("past_key_values")
            cache = getattr(cache, "self_attention_cache", cache)
            if isinstance(cache, PagedCache) and module is door._model():
                counts["forwards over pages"] += 1
            after(door, module, args, given, output)

        return counted

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, nextitem: Any) -> None:
        """Closes the caches of models that are gone."""
        if nextitem is None or len(self._kvs) > 8:
            gc.collect()
        self._sweep(every=nextitem is None)

    def _sweep(self, *, every: bool) -> None:
        kept = []
        for model, kv in self._kvs:
            if every or model() is None:
                stats = kv.stats()
                for name in ("tokens_seen", "tokens_reused"):
                    self.counts[name.replace("_", " ")] += stats[name]
                if stats["tokens_seen"]:
                    self.counts[f"served {'foreign' if stats['foreign'] else 'known'}"] += 1
                self.counts["models that reused tokens"] += stats["tokens_reused"] > 0
                kv.close()
            else:
                kept.append((model, kv))
        self._kvs = kept

    def counted(self) -> Counter[str]:
        """The counts, when all tests are done."""
        self._sweep(every=True)
        return self.counts
