"""A name belongs to a call: what another thread changes meanwhile is in no page that is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import flowkv
from tests.hooks import models
from tests.hooks.compare import assert_same, attached, foreign, generate
from tests.hooks.tabled import as_library
from tests.hooks.test_foreign import mlp
from tests.inside import PackedLayer, PagedLayer

pytestmark = pytest.mark.filterwarnings("ignore:FlowKV shares nothing")
Model = Any
VALUES = (1.0, -3.0)


def put_hook(model: Model, value: float) -> None:
    layer = mlp(model)
    layer._forward_hooks.clear()
    if value != 1.0:
        layer.register_forward_hook(lambda module, args, out: out * -3.0)


def put_epsilon(model: Model, value: float) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-6 if value == 1.0 else 3.0


def times() -> Model:
    model = models.short()
    model.model.layers[0].mlp = as_library().Times(mlp(model), model.config)
    return model.eval()


KINDS: dict[str, tuple[Callable[[], Model], Callable[[Model, float], Any]]] = {
    "attribute": (times, lambda model, value: setattr(mlp(model), "scale", value)),
    "hook": (models.short, put_hook),
    "table": (times, lambda model, value: as_library().MAPPED.update(scale=value)),
    "buffer": (times, lambda model, value: setattr(mlp(model), "gain", torch.full((1,), value))),
    "buffer_in_place": (times, lambda model, value: mlp(model).gain.fill_(value)),
    "library": (models.short, put_epsilon),
}


@pytest.fixture
def midway(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], Any]]]:
    """What another thread does when the next layer takes its keys and values."""
    todo: list[Callable[[], Any]] = []
    for cls in (PagedLayer, PackedLayer):
        plain = cls.update

        def update(self: Any, *args: Any, plain: Any = plain, **kwargs: Any) -> Any:
            if todo:
                thread = threading.Thread(target=todo.pop(0))
                thread.start()
                thread.join()
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(cls, "update", update)
    yield todo
    as_library().MAPPED["scale"] = 1.0


def by_generate(model: Model, kv: flowkv.KV | None, ids: torch.Tensor) -> torch.Tensor:
    return generate(model, 3, input_ids=ids).logits[0]


def by_forward(model: Model, kv: flowkv.KV | None, ids: torch.Tensor) -> torch.Tensor:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1]


@pytest.mark.parametrize("run", [by_generate, by_forward], ids=["generate", "forward"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_within_a_forward_is_not_kept(
    kind: str, run: Any, midway: list[Any], tmp_path
) -> None:
    """Not in the process, not over a directory: each state is answered as a plain model does."""
    (make, put), prompts = KINDS[kind], [models.prompt(60, seed) for seed in (1, 2, 3)]
    model, plain = make(), make()
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        run(model, None, models.prompt(70, 9))
        for i, ids in enumerate(prompts):
            before, after = VALUES[i % 2], VALUES[1 - i % 2]
            put(model, before)
            midway.append(lambda after=after: put(model, after))
            run(model, None, ids)
            assert not midway or foreign(kv)
            midway.clear()
        for ids in prompts:
            for value in (*VALUES, 1.0):
                put(model, value)
                put(plain, value)
                found, wanted = run(model, None, ids), run(plain, None, ids)
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)
    for value in VALUES:
        again = make()
        put(again, value)
        put(plain, value)
        with attached(again, disk=f"{tmp_path}/kv:64MiB"):
            for ids in prompts:
                found, wanted = run(again, None, ids), run(plain, None, ids)
                torch.testing.assert_close(found, wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["attribute", "hook"])
def test_what_changes_within_a_step_of_an_engine_is_not_kept(kind: str, midway: list[Any]) -> None:
    (make, put), ids = KINDS[kind], models.prompt(60, 1)[0].tolist()
    model, plain = make(), make()
    with attached(model) as kv, flowkv.Engine(model, kv) as engine:
        engine.run([models.prompt(70, 9)[0].tolist()], max_new_tokens=2)
        midway.append(lambda: put(model, -3.0))
        engine.run([ids], max_new_tokens=2)
        for value in (1.0, -3.0, 1.0):
            put(model, value)
            put(plain, value)
            wanted = generate(plain, 4, input_ids=torch.tensor([ids])).sequences[0, 60:].tolist()
            assert engine.run([ids], max_new_tokens=4)[0].tokens == wanted


def test_what_alternates_is_forgotten_once_it_is_noticed(midway: list[Any], tmp_path) -> None:
    """Changed and changed back within a forward leaves no trace, until it is caught once."""
    make, put = KINDS["attribute"]
    model, plain = make(), make()
    with attached(model, disk=f"{tmp_path}/kv:64MiB") as kv:
        midway += [lambda: put(model, -3.0), lambda: None, lambda: put(model, 1.0)]
        generate(model, 3, input_ids=models.prompt(60, 1))
        midway += [lambda: put(model, -3.0)]
        generate(model, 3, input_ids=models.prompt(60, 2))
        assert "mlp.scale: changed during a forward" in foreign(kv)
        put(model, 1.0)
        for seed in (1, 2):
            ids = models.prompt(60, seed)
            assert_same(generate(model, 3, input_ids=ids), generate(plain, 3, input_ids=ids))
    again = make()
    with attached(again, disk=f"{tmp_path}/kv:64MiB"):
        for seed in (1, 2):
            ids = models.prompt(60, seed)
            assert_same(generate(again, 3, input_ids=ids), generate(plain, 3, input_ids=ids))


def test_weights_that_change_and_come_back_within_a_forward(midway: list[Any]) -> None:
    """Another thread loads weights, and then the old ones."""
    model, plain, ids = models.short(), models.short(), models.prompt(60, 1)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    others = {name: -tensor if "down_proj" in name else tensor for name, tensor in weights.items()}

    wanted = generate(plain, 3, input_ids=ids)
    with attached(model):
        generate(model, 3, input_ids=models.prompt(70, 9))
        midway += [lambda: model.load_state_dict(others), lambda: model.load_state_dict(weights)]
        generate(model, 3, input_ids=ids)
        assert not midway
        assert_same(generate(model, 3, input_ids=ids), wanted)
