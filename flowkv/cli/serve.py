"""`flowkv serve`: transformers' OpenAI-compatible server over an attached model."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import flowkv
from flowkv.cli.arguments import AddVerb
from flowkv.core.config import load_config
from flowkv.core.errors import ConfigError, FlowKVError
from flowkv.report.screen import Screen


def add_verb(verb: AddVerb) -> None:
    """Add the verb `serve`."""
    parser = verb("serve", _serve, "run `transformers serve` with a cache that stays")
    parser.option("--store", "DIR[:SIZE]", "made if need be; default none", dest="disk")
    parser.option("--gpu", "SIZE", "device memory for pages; default as of flowkv.attach")
    about = "folder or Hugging Face id of a causal language model, or smollm2"
    parser.add_argument("model", metavar="PATH_OR_ID", help=about)
    about = "options of `transformers serve`, as --port 8000"
    rest = parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help=about)
    rest.required = False  # or the error about a missing model names it, too


def _serve(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    config = {name: vars(given)[name] for name in ("gpu", "disk") if vars(given)[name]}
    load_config(**config)
    try:
        from flowkv.hooks.huggingface import load, serve
    except FlowKVError:
        raise
    except ImportError as error:
        remedy = "pip install 'flowkv[serve]', with transformers from 5.17 to 5.24"
        raise ConfigError(f"`transformers serve` cannot be used ({error})", remedy) from error
    model = str(load.smollm2_path()) if given.model == load.NAME else given.model
    import torch

    with contextlib.ExitStack() as stack:

        def start(loaded: Any) -> flowkv.Engine:
            kv = stack.enter_context(flowkv.attach(loaded, **config))
            engine = flowkv.Engine(loaded, kv, seed=torch.initial_seed())  # --default-seed
            stack.callback(engine.close, drain=False)
            screen.say(f"FlowKV serves {given.model}")
            return engine

        serve.run(model, given.options, start)
    return 0, {}
