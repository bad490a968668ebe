"""Names and writes: a forward's own are in no name, others' to the same place are."""

from __future__ import annotations

import collections
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.hooks import models
from tests.hooks.compare import assert_same, attached, foreign, generate, reused
from tests.inside import identity

pytestmark = [
    pytest.mark.filterwarnings("ignore:FlowKV shares nothing"),
    pytest.mark.usefixtures("all_is_loaded"),
]
Model = torch.nn.Module
Make = Callable[[], tuple[Model, Any]]
Edit = Callable[[Model, Any], None]


def mlp(model: Model) -> Model:
    return model.model.layers[1].mlp


def hooked(state: Callable[[], Any], hook: Callable[[Any, Model, torch.Tensor], Any]) -> Make:
    """Makes a model with a hook that reads, and perhaps writes, what `state` gives."""

    def make() -> tuple[Model, Any]:
        model, held = models.short(), state()
        mlp(model).register_forward_hook(lambda module, args, out: hook(held, module, out))
        return model, held

    return make


def in_process(make: Make, edits: list[Edit]) -> None:
    """After each edit the served model answers as a plain twin with the same edits; and again."""
    prompt, (model, held) = models.prompt(60), make()
    with attached(model) as kv, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for done in range(len(edits) + 1):
            if done:
                edits[done - 1](model, held)
            twin, beside = make()
            for edit in edits[:done]:
                edit(twin, beside)
            for _ in range(2):
                with torch.no_grad():
                    theirs = generate(twin, 2, input_ids=prompt)
                assert_same(generate(model, 2, input_ids=prompt), theirs)
        assert kv is not None


def over_a_store(make: Make, edits: list[Edit], place: str, *, served: bool = True) -> None:
    """A model that was edited before a restart finds nothing of others, and what is its own."""
    prompt = models.prompt(60)
    for again in (False, True):
        for done in range(len(edits) + 1):
            model, held = make()
            twin, beside = make()
            for edit in edits[:done]:
                edit(model, held)
                edit(twin, beside)
            with attached(model, disk=place) as kv, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ours = generate(model, 2, input_ids=prompt)
                assert_same(ours, generate(twin, 2, input_ids=prompt))
                assert foreign(kv) or not served or reused(kv) == (48 if again else 0)


def stays(make: Callable[[], Model], place: str) -> None:
    """Reuse is complete in the process, and after a restart, if the model was used before, too."""
    prompt = models.prompt(60)
    for again in (False, True):
        model = make()
        if again:
            generate(model, 3, input_ids=models.prompt(50, 77))
        with attached(model, disk=place) as kv:
            for call in range(3):
                before = reused(kv)
                generate(model, 3, input_ids=prompt)
                assert reused(kv) - before == (48 if again or call else 0), (again, call)


# ---- counters


def a_list(model: Model) -> None:
    n = [0]

    def hook(module, args, out):
        n[0] += 1

    mlp(model).register_forward_hook(hook)


def nested_lists(model: Model) -> None:
    n = [[0], [0]]

    def hook(module, args, out):
        n[1][0] += 1

    mlp(model).register_forward_hook(hook)


def a_kept_output(model: Model) -> None:
    kept = [0, None]

    def hook(module, args, out):
        kept[1] = out

    mlp(model).register_forward_hook(hook)


def an_equal_list(model: Model) -> None:
    kept = {}

    def hook(module, args, out):
        kept["width"] = [out.shape[0], out.shape[-1]]

    mlp(model).register_forward_hook(hook)


def a_nonlocal(model: Model) -> None:
    n = 0

    def hook(module, args, out):
        nonlocal n
        n += 1

    mlp(model).register_forward_hook(hook)


CALLS = 0


def a_global(model: Model) -> None:
    def hook(module, args, out):
        global CALLS
        CALLS += 1

    mlp(model).register_forward_hook(hook)


class Counter:
    n = 0


def an_attribute_of_a_class(model: Model) -> None:
    def hook(module, args, out):
        Counter.n += 1

    mlp(model).register_forward_hook(hook)


class Slot:
    __slots__ = ("n",)


def a_slot(model: Model) -> None:
    slot = Slot()
    slot.n = 0

    def hook(module, args, out):
        slot.n += 1

    mlp(model).register_forward_hook(hook)


def a_configuration(model: Model) -> None:
    config = model.config

    def hook(module, args, out):
        config.calls = getattr(config, "calls", 0) + 1

    mlp(model).register_forward_hook(hook)


def a_dictionary_that_grows(model: Model) -> None:
    seen = {}

    def hook(module, args, out):
        seen[len(seen)] = out

    mlp(model).register_forward_hook(hook)


def a_set_that_grows(model: Model) -> None:
    seen = set()
    mlp(model).register_forward_hook(lambda module, args, out: seen.add(len(seen)))


def a_full_queue(model: Model) -> None:
    last = collections.deque([0, 0, 0], maxlen=3)
    mlp(model).register_forward_hook(lambda module, args, out: last.append(out.shape[1]))


def a_numpy_counter(model: Model) -> None:
    n = np.zeros(1, int)

    def hook(module, args, out):
        n[0] += 1

    mlp(model).register_forward_hook(hook)


def a_numpy_mean(model: Model) -> None:
    mean = np.zeros(64, np.float32)

    def hook(module, args, out):
        mean[:] = 0.9 * mean + out.mean((0, 1)).numpy()

    mlp(model).register_forward_hook(hook)


def an_uncounted_tensor(model: Model) -> None:
    mean = torch.zeros(64)
    mlp(model).register_forward_hook(lambda m, args, out: mean.data.copy_(out.mean((0, 1))) is None)


class Averaging(torch.nn.Module):
    """Keeps a mean of what it saw, as batch norms and quantizers do, where nobody counts."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner, self.n = inner, [0]
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.mul_(0.9).add_(x.mean((0, 1)))
        self.n[0] += 1
        return self.inner(x)


def an_uncounted_buffer(model: Model) -> None:
    model.model.layers[1].mlp = Averaging(mlp(model)).eval()


COUNTERS = [
    a_list,
    nested_lists,
    a_kept_output,
    an_equal_list,
    a_nonlocal,
    a_global,
    an_attribute_of_a_class,
    a_slot,
    a_configuration,
    a_dictionary_that_grows,
    a_set_that_grows,
    a_full_queue,
    a_numpy_counter,
    a_numpy_mean,
    an_uncounted_tensor,
    an_uncounted_buffer,
]


@pytest.mark.parametrize("late", [False, True], ids=["before", "later"])
@pytest.mark.parametrize("count", COUNTERS, ids=lambda count: count.__name__)
def test_a_forward_that_counts_makes_its_model_foreign(count: Edit, late: bool) -> None:
    """Its answers stay those of a plain model, and nothing that it computed is shared.

    What is equal after each forward has one name, and is shared.
    """
    model, plain, prompt = models.short(), models.short(), models.prompt(60)
    count(plain)
    if not late:
        count(model)
    with attached(model) as kv:
        if late:
            generate(model, 3, input_ids=prompt)
            count(model)
        for _ in range(3):
            theirs = generate(plain, 3, input_ids=prompt)
            assert_same(generate(model, 3, input_ids=prompt), theirs)
        assert foreign(kv) or count is an_equal_list  # which is named by its content
        before = reused(kv)
        generate(model, 3, input_ids=prompt)
        assert reused(kv) == before + (0 if foreign(kv) else 48)


# ---- what somebody else writes to the same places


def a_default(held: dict[str, float], module: Model, out: torch.Tensor) -> torch.Tensor:
    return out * held.setdefault("scale", 1.0)


def a_default_dict(held: dict[str, float], module: Model, out: torch.Tensor) -> torch.Tensor:
    return out * held["scale"]


def an_attribute(held: Any, module: Model, out: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "scale"):
        module.scale = 1.0
    return out * module.scale


class Lazy(torch.nn.Module):
    """Makes its scale when it is first called, unless somebody has made it."""

    def __init__(self, inner: Model, first: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.scale, self.first, self.calls = inner, None, first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.scale is None:
            self.scale = self.first()
        return self.inner(x) * self.scale


def lazy(first: Callable[[], Any]) -> Make:
    def make() -> tuple[Model, Any]:
        model = models.short()
        model.model.layers[1].mlp = Lazy(mlp(model), first).eval()
        return model, None

    return make


def sets_item(value: float) -> Edit:
    return lambda model, held: held.update(scale=value)


def sets_attribute(value: Any) -> Edit:
    return lambda model, held: setattr(mlp(model), "scale", value)


LAZY: list[tuple[str, Make, list[Edit]]] = [
    ("setdefault", hooked(dict, a_default), [sets_item(2.0), sets_item(0.5)]),
    (
        "defaultdict",
        hooked(lambda: collections.defaultdict(lambda: 1.0), a_default_dict),
        [sets_item(2.0), sets_item(0.5)],
    ),
    ("attribute", hooked(dict, an_attribute), [sets_attribute(2.0), sets_attribute(0.5)]),
    ("number", lazy(lambda: 1.0), [sets_attribute(2.0), sets_attribute(0.5)]),
    (
        "tensor",
        lazy(lambda: torch.ones(1)),
        [sets_attribute(torch.full((1,), 2.0)), sets_attribute(torch.full((1,), 0.5))],
    ),
]
each_lazy = pytest.mark.parametrize(
    ("make", "edits"), [c[1:] for c in LAZY], ids=[c[0] for c in LAZY]
)


@each_lazy
def test_what_a_forward_made_first_is_set_by_hand(make: Make, edits: list[Edit]) -> None:
    in_process(make, edits)


@pytest.mark.parametrize(
    "kind",
    [
        "attribute",
        "tensor",
        *(
            pytest.param(k, marks=pytest.mark.thorough)
            for k in ("setdefault", "defaultdict", "number")
        ),
    ],
)
def test_what_a_forward_makes_first_was_set_before(kind: str, tmp_path: Any) -> None:
    ((make, edits),) = [case[1:] for case in LAZY if case[0] == kind]
    over_a_store(make, edits, f"{tmp_path}/kv:64MiB")


def test_what_a_hook_made_that_was_hung_on_later() -> None:
    """And it is reused again once the edit is taken back."""
    model, prompt, held = models.short(), models.prompt(60), dict[str, float]()
    with attached(model) as kv:
        generate(model, 4, input_ids=prompt)
        mlp(model).register_forward_hook(lambda module, args, out: a_default(held, module, out))
        for _ in range(3):
            generate(model, 4, input_ids=prompt)
        assert foreign(kv) or reused(kv) == 2 * 48 - 48
        for scale in (2.0, 1.0, 2.0):
            before = reused(kv)
            held["scale"] = scale
            twin = models.short()
            mlp(twin).register_forward_hook(lambda module, args, out, s=scale: out * s)
            found = generate(model, 4, input_ids=prompt)
            assert_same(found, generate(twin, 4, input_ids=prompt))
        assert foreign(kv) or reused(kv) == before + 48


class Once(torch.nn.Module):
    """Adds what is pending, once."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner, self.pending = inner, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.pending is not None:
            y, self.pending = y + self.pending, None
        return y


def once() -> tuple[Model, Any]:
    model = models.short()
    model.model.layers[1].mlp = Once(mlp(model)).eval()
    return model, None


def reset(held: dict[str, float], module: Model, out: torch.Tensor) -> torch.Tensor:
    scale, held["scale"] = held["scale"], 1.0
    return out * scale


def steer(factor: float) -> Edit:
    def edit(model: Model, held: Any) -> None:
        vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
        mlp(model).pending = factor * vector if factor else None

    return edit


ONCE: list[tuple[str, Make, list[Edit], int]] = [
    ("vector", once, [steer(f) for f in (1.0, 0.0, 2.0, 1.0)], 64),
    (
        "reset",
        hooked(lambda: {"scale": 1.0}, reset),
        [sets_item(s) for s in (2.0, 1.0, 3.0, 2.0)],
        60,
    ),
]


@pytest.mark.parametrize(
    ("make", "edits", "length"), [c[1:] for c in ONCE], ids=[c[0] for c in ONCE]
)
def test_what_is_set_for_one_call_and_used_up(make: Make, edits: list[Edit], length: int) -> None:
    """Also by a longer prompt, of which the tokens of such a call are a part."""
    prompt, (model, held), (twin, beside) = models.prompt(length), make(), make()
    with attached(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for edit in edits:
            edit(model, held)
            edit(twin, beside)
            ours, theirs = (generate(m, 24, input_ids=prompt) for m in (model, twin))
            assert_same(ours, theirs)
            edit(model, held)
            edit(twin, beside)
            longer = torch.cat([ours.sequences, models.prompt(8, 3)], 1)
            ours, theirs = (generate(m, 4, input_ids=longer) for m in (model, twin))
            assert_same(ours, theirs)


def test_another_thread_writes_once_during_a_forward() -> None:
    """What looks like a forward's own write, once, is none."""
    model, prompt, held = models.short(), models.prompt(60), {"scale": 1.0}
    mlp(model).register_forward_hook(lambda module, args, out: out * held["scale"])
    with attached(model) as kv:
        generate(model, 4, input_ids=prompt)
        todo = [2.0]

        def at(module, args, out):
            if todo:
                thread = threading.Thread(target=held.update, kwargs={"scale": todo.pop()})
                thread.start()
                thread.join()

        handle = model.model.layers[0].register_forward_hook(at)
        generate(model, 4, input_ids=models.prompt(50, 7))
        handle.remove()
        for scale in (2.0, 1.0, 2.0, 3.0, 1.0):
            held["scale"] = scale
            before = reused(kv)
            twin = models.short()
            mlp(twin).register_forward_hook(lambda module, args, out, s=scale: out * s)
            found = generate(model, 4, input_ids=prompt)
            assert_same(found, generate(twin, 4, input_ids=prompt))
        assert foreign(kv) or reused(kv) == before + 48


def test_an_edit_between_two_steps_where_a_forward_writes() -> None:
    """What is computed behind it is in no page of what was before."""
    prompt = models.prompt(60)

    def both(model: Model) -> tuple[Any, Any]:
        held = {"n": 0}

        def hook(module, args, out):
            held["n"] += 1
            return out * (3.0 if held["n"] < 0 else 1.0)

        mlp(model).register_forward_hook(hook)

        class Schedule(transformers.LogitsProcessor):
            def __init__(self) -> None:
                self.step = 0

            def __call__(self, ids, scores):
                self.step += 1
                held["n"] = {1: -1000, 4: 0}.get(self.step, held["n"])
                return scores

        first = generate(
            model,
            20,
            input_ids=prompt,
            logits_processor=transformers.LogitsProcessorList([Schedule()]),
        )
        longer = torch.cat([first.sequences, models.prompt(8, 3)], 1)
        return first, generate(model, 4, input_ids=longer)

    theirs = both(models.short())
    model = models.short()
    with attached(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ours, wanted in zip(both(model), theirs, strict=True):
            assert_same(ours, wanted)


# ---- chance

CHANCE = {
    "numpy": "import numpy as np\ndef hook(m, a, o): return o + K * np.random.rand()",
    "numpy_random": "from numpy import random as r\ndef hook(m, a, o): return o + K * r.rand()",
    "gauss": "from random import gauss\ndef hook(m, a, o): return o + K * gauss(0, 1)",
    "uniform": "from random import uniform\ndef hook(m, a, o): return o + K * uniform(0, 1)",
    "own": "from random import Random\nr = Random(0)\ndef hook(m, a, o): return o + K * r.random()",
    "system": "from random import SystemRandom\nr = SystemRandom()\n"
    "def hook(m, a, o): return o + K * r.random()",
    "default_rng": "import numpy\nr = numpy.random.default_rng(0)\n"
    "def hook(m, a, o): return o + K * float(r.normal())",
    "state": "import numpy\nr = numpy.random.RandomState(0)\n"
    "def hook(m, a, o): return o + K * float(r.normal())",
    "object": "from random import Random\nclass R:\n"
    "    def __init__(self): self.r = Random(1)\n"
    "    def __call__(self, m, a, o): return o + K * self.r.random()\nhook = R()",
    "import": "def hook(m, a, o):\n    import random\n    return o + K * random.random()",
    "import_numpy": "def hook(m, a, o):\n    import numpy as n\n    return o + K * n.random.rand()",
    "urandom": "import os\ndef hook(m, a, o): return o + K * os.urandom(1)[0] / 256",
    "time": "import time\ndef hook(m, a, o): return o + K * (time.time() % 1)",
    "seeded_by_clock": "import time, torch\ndef hook(m, a, o):\n"
    "    g = torch.Generator().manual_seed(int(time.time() * 1e6) % 10**6)\n"
    "    return o + K * torch.randn(o.shape, generator=g)",
}


def chance(name: str, strength: float) -> Any:
    space: dict[str, Any] = {"__name__": "of_a_test", "K": strength}
    exec(CHANCE[name], space)
    return space["hook"]


@pytest.mark.parametrize("name", CHANCE)
def test_what_draws_by_itself_is_not_shared(name: str) -> None:
    """Neither when it is hung on later, nor when it is too weak for the trials at attach."""
    prompt = models.prompt(60)
    model = models.short()
    with attached(model) as kv, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlp(model).register_forward_hook(chance(name, 1.0))
        for _ in range(2):
            generate(model, 2, input_ids=prompt)
        assert foreign(kv) or reused(kv) == 0
    model = models.short()
    mlp(model).register_forward_hook(chance(name, 1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with attached(model) as kv:
            for _ in range(2):
                generate(model, 2, input_ids=prompt)
            assert foreign(kv) or reused(kv) == 0


# ---- encodings that depend on length

LENGTHS = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 2.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}


def by_length(kind: str) -> Make:
    def make() -> tuple[Model, Any]:
        rope = {"rope_type": kind, "rope_theta": 10000.0, **LENGTHS[kind]}
        config = transformers.LlamaConfig(
            **models.GROUPED | {"rope_parameters": rope, "max_position_embeddings": 1024}
        )
        torch.manual_seed(0)
        return models.sharpen(transformers.LlamaForCausalLM(config)), None

    return make


def frequencies_in_place(model: Model, held: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(3)


def both_frequencies(model: Model, held: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.original_inv_freq = rotary.original_inv_freq * 3
    rotary.inv_freq = rotary.inv_freq * 3


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("edit", [frequencies_in_place, both_frequencies])
def test_frequencies_of_an_encoding_by_length(kind: str, edit: Edit, tmp_path) -> None:
    served, _ = by_length(kind)()
    generate(served, 2, input_ids=models.prompt(20))
    rotary = served.model.rotary_emb
    if edit is frequencies_in_place and rotary.inv_freq is rotary.original_inv_freq:
        pytest.skip("in this release they are one tensor, once a forward has run")
    in_process(by_length(kind), [edit])
    if kind == "dynamic" or edit is both_frequencies:  # longrope takes the first at once back
        left = kind == "dynamic" and edit is frequencies_in_place  # to the model's own cache
        over_a_store(by_length(kind), [edit], f"{tmp_path}/kv:64MiB", served=not left)
    stays(lambda: by_length(kind)()[0], f"{tmp_path}/other:64MiB")


class Renewed(Mapping):
    """Gives new lists each time."""

    def __init__(self) -> None:
        self.held = {"a": [1, 2]}

    def __getitem__(self, key: str) -> list[int]:
        return [*self.held[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


def test_a_mapping_of_ones_own_is_foreign() -> None:
    model = models.short()
    model.kept = kept = Renewed()
    assert kept["a"] == [1, 2] and identity.Identity(model).foreign
