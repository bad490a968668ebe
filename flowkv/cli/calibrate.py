"""`flowkv calibrate`: learns from a text how a model's cold pages are coded, into a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import flowkv
from flowkv.cli.arguments import AddVerb, load_model, model_arguments, read_text
from flowkv.core.config import format_size, load_config
from flowkv.core.errors import ConfigError
from flowkv.report.screen import Screen


def add_verb(verb: AddVerb) -> None:
    """Add the verb `calibrate`."""
    parser = verb("calibrate", _calibrate, "learn from a text how cold pages are coded")
    model_arguments(parser, required=True)
    about = "16,000 tokens or more of the kind that will be cached; - for standard input"
    parser.option("--text", "FILE", about, required=True)
    parser.option("--out", "FILE", "the basis, for LMCache and vLLM", required=True, type=Path)
    parser.option("--kl", "BOUND", "most divergence, in nats a token; default 0.005")


def _calibrate(given: argparse.Namespace, screen: Screen) -> tuple[int, Any]:
    cold = f"kvt:kl={given.kl}" if given.kl else "kvt"
    load_config(cold=cold)
    if not given.out.parent.is_dir():  # before minutes of learning
        raise ConfigError(f"{given.out.parent} is no directory", "Make it, or name another file")
    text = read_text(given.text)
    loaded = load_model(given, screen)
    from flowkv.hooks.huggingface.attach import door_of
    from flowkv.hooks.huggingface.calibrate import Calibrator
    from flowkv.kvt.file import BasisFile, save_basis

    with flowkv.attach(loaded.model, gpu="256MiB", cold=cold) as kv:
        door: Any = door_of(loaded.model)
        bases: Any = kv.bases
        groups = door.plan.geometry.groups
        if len(groups) > 1:
            raise ConfigError(
                f"the layers of {given.model} are of several kinds, and a file holds one basis",
                'Use the codec "kv8"',
            )
        with screen.progress("learning"):
            found = Calibrator(door).calibrate([text], bases, kv.config.cold_divergence())
        if not found["kept"]:
            return 1, found
        made = BasisFile(given.model, groups[0], kv.page_size, bases.current[0].data)
    save_basis(given.out, made)
    size = format_size(given.out.stat().st_size)
    bits, kl = found["bits"], found["kl"]
    screen.say(f"{given.out}, {size}: {bits:.2f} bits a value at a divergence of {kl:.4f}")
    return 0, found
