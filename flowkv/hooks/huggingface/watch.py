"""Notices, in microseconds, that a model is no longer what it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flowkv.hooks.huggingface.fingerprint import PROCESS

ADAPTER_STATE = frozenset(
    """active_adapter active_adapters _active_adapter _active_adapters _disable_adapters
    disable_adapters _adapters_disabled merged_adapters scaling""".split()
)
"""Attributes by which adapter libraries say which of their weights count."""

COMPILED = "compiled"
"""Among a module's changes: `torch.compile` was used on it."""

_OWN_HOOKS = ("transformers.", "accelerate.", "flowkv.")
_KINDS = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class _Module(NamedTuple):
    held: dict[str, Any]
    attributes: int
    children: tuple[torch.nn.Module | None, ...]
    hooks: int
    changes: list[str]


class _Tensor(NamedTuple):
    holder: dict[str, Any]
    name: str
    tensor: torch.Tensor
    address: int
    version: int


class Watch:
    """What can be seen of a model without reading its weights.

    `same` is asked for every new cache and before pages are published, so it compares a list of
    what was seen with what is there: objects, addresses, versions, and sizes of dictionaries.

    Args:
        model: The model.
        passing: Suffix of buffers that are rewritten by every forward; "" for none.
    """

    def __init__(self, model: torch.nn.Module, passing: str = "") -> None:
        self._passing = passing
        self.see(model)

    def see(self, model: torch.nn.Module) -> None:
        """Takes the model as it is now."""
        self._active = active_adapters(model)
        self._modules, self._tensors = list[_Module](), list[_Tensor]()
        for module in model.modules():
            held = module.__dict__
            hooks = sum(len(held[kind]) for kind in _HOOKS)
            children = tuple(held["_modules"].values())
            self._modules.append(_Module(held, len(held), children, hooks, changes(held)))
            for kind in _KINDS:
                for name, tensor in held[kind].items():
                    if tensor is not None and not (self._passing and name.endswith(self._passing)):
                        seen = _address(tensor), _version(tensor)
                        self._tensors.append(_Tensor(held[kind], name, tensor, *seen))

    @property
    def compiled(self) -> bool:
        """Whether parts of it are compiled: what they trace must not look into caches of ours."""
        return any(COMPILED in module.changes for module in self._modules)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The weights that were seen, each once."""
        return list({id(seen.tensor): seen.tensor for seen in self._tensors}.values())

    def forget(self) -> None:
        """Lets go of a model that is gone."""
        self._modules, self._tensors = [], []

    def same(self, model: torch.nn.Module) -> bool:
        """Whether nothing was replaced, moved, written to in the open, switched or hooked."""
        for holder, name, tensor, address, version in self._tensors:
            if holder.get(name) is not tensor or _version(tensor) != version:
                return False
            if _address(tensor) != address:
                return False
        for held, attributes, children, hooks, known in self._modules:
            if tuple(held["_modules"].values()) != children:
                return False
            found = len(held["_forward_hooks"]) + len(held["_forward_pre_hooks"])
            # More attributes or hooks than before are looked at; most are transformers' own.
            touched = len(held) != attributes or found != hooks or bool(known)
            if touched and changes(held) != known:
                return False
        return active_adapters(model) == self._active


def changes(held: dict[str, Any]) -> list[str]:
    """What adapter libraries, hooks and compilers did to a module, by its `__dict__`."""
    found = [
        f"{name}={held[name]}"
        for name in ADAPTER_STATE
        if name in held and held[name] and not isinstance(held[name], float)
    ]  # a plain number called `scaling` is attention's own
    hooks = [hook for kind in _HOOKS for hook in held[kind].values()]
    if "forward" in held:
        hooks.append(held["forward"])
    compiled = held.get("_compiled_call_impl") is not None or "_orig_mod" in held["_modules"]
    if compiled or hasattr(held.get("forward"), "_torchdynamo_orig_callable"):
        found.append(COMPILED)
    for hook in hooks:
        if not str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS):
            found.append(f"{hook.__class__.__name__} {id(hook)} of {PROCESS}")
    return sorted(found)


def active_adapters(model: torch.nn.Module) -> str:
    """Names of the adapters that the model as a whole says are active."""
    active = set()
    for name in ("active_adapters", "active_adapter"):
        found = getattr(model, name, None)
        try:
            value = found() if callable(found) else found
        except (ValueError, ImportError, AttributeError):  # none was ever loaded
            continue
        if value:
            active.add(f"{name}={value}")
    return "; ".join(sorted(active))


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode: no versions are counted
        return -1


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a wrapper without storage of its own
        return -1
