"""Train the tiny byte-level Llama that demonstrations and tests use, and export it.

Run from the root of the repository (six to seven CPU minutes on one core):

    OMP_NUM_THREADS=1 python -m bench.tiny.train flowkv/data/tiny

What matters is not the lowest loss but a model that needs its cache. Trained on plain text alone,
a model of this size predicts from the last few dozen bytes, and a cache could lose every far page
without a visible effect. So 40 % of the rows repeat themselves: predicting them takes induction
heads, which copy from far keys and values. Rows of 2048 and 4096 bytes, one step in four, make the
model usable over the whole context.
"""

import argparse
import math
import pathlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from bench.tiny.export import export
from bench.tiny.model import Shape, TinyLlama
from tests.fixture_model import corpus


@dataclass(frozen=True)
class Recipe:
    """How the model is trained."""

    steps: int = 1500
    seed: int = 0
    row_bytes: int = 512
    step_bytes: int = 2048
    longest_row_bytes: int = 4096
    repeat_share: float = 0.4
    shortest_repeat_bytes: int = 24
    matrix_rate: float = 0.02  # Muon
    other_rate: float = 3e-3  # AdamW: embedding, head and norms
    warmup_steps: int = 20
    decay_share: float = 0.4

    def rate(self, step: int) -> float:
        """Return the factor on both rates: up, level, then linearly to zero."""
        decay = (self.steps - step) / (self.decay_share * self.steps)
        return min(1.0, (step + 1) / self.warmup_steps, decay)

    def row_length(self, step: int) -> int:
        """Return the bytes predicted in a row: every 4th step is one long row."""
        if step % 16 == 15:
            return self.longest_row_bytes
        return self.step_bytes if step % 4 == 3 else self.row_bytes


class Muon:
    """Momentum whose update is made orthogonal (Jordan et al. 2024, "Muon").

    Matrices of one shape are stepped as one batch.
    """

    def __init__(self, weights: list[nn.Parameter], momentum: float, decay: float) -> None:
        self.momentum, self.decay = momentum, decay
        shapes = dict.fromkeys(weight.shape for weight in weights)
        self.groups = [[w for w in weights if w.shape == shape] for shape in shapes]
        self.buffers = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move the weights one step along their `.grad`."""
        for weights, buffer in zip(self.groups, self.buffers, strict=True):
            gradient = torch.stack([weight.grad for weight in weights])
            buffer.mul_(self.momentum).add_(gradient)
            update = orthogonal(gradient.add(buffer, alpha=self.momentum))
            rows, columns = weights[0].shape
            for weight, direction in zip(weights, update, strict=True):
                weight.mul_(1 - rate * self.decay)
                weight.sub_(direction, alpha=rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Return about the nearest orthogonal matrices to `x [N, rows, columns]`.

    Five Newton-Schulz steps in bf16; singular values end between 0.7 and 1.2, which is enough.
    """
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT).mT
    x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.float()


def batches(recipe: Recipe) -> Iterator[torch.Tensor]:
    """Yield rows `[B, T + 1]` for each step: random places of the text, some repeating."""
    text = torch.frombuffer(bytearray(corpus("train")), dtype=torch.uint8)
    random = torch.Generator().manual_seed(recipe.seed + 1)
    for step in range(recipe.steps):
        length = recipe.row_length(step)
        rows = []
        for _ in range(max(1, recipe.step_bytes // length)):
            start = int(torch.randint(len(text) - length, (), generator=random))
            row = text[start : start + length + 1]
            repeat, period = torch.rand(2, generator=random).tolist()
            if repeat < recipe.repeat_share:
                # Log-uniform between the shortest repeat and half a row: near and far copies.
                shortest = recipe.shortest_repeat_bytes
                n = round(shortest * (length / 2 / shortest) ** period)
                row = row[:n].repeat(length // n + 1)[: length + 1]
            rows.append(row)
        yield torch.stack(rows).long()


def train(shape: Shape, recipe: Recipe) -> TinyLlama:
    """Train one model and print its progress."""
    torch.manual_seed(recipe.seed)
    model = TinyLlama(shape)
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [w for w in model.parameters() if all(w is not matrix for matrix in matrices)]
    muon = Muon(matrices, momentum=0.95, decay=0.01)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01)
    started_s, losses = time.process_time(), []
    for step, rows in enumerate(batches(recipe)):
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(rows[:, :-1])
        loss = functional.cross_entropy(scores.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        for group in adam.param_groups:
            group["lr"] = recipe.other_rate * recipe.rate(step)
        adam.step()
        muon.step(recipe.matrix_rate * recipe.rate(step))
        model.zero_grad()
        losses.append(loss.item() / math.log(2))
        if (step + 1) % 100 == 0:
            bits, cpu_s = sum(losses[-100:]) / 100, time.process_time() - started_s
            print(f"step {step + 1:5d}  {bits:.3f} bits/byte  {cpu_s:.0f} CPU s", flush=True)
    return model.eval()


def training_facts(recipe: Recipe, cpu_s: float) -> str:
    """Return the paragraph of the model card that tells how the model was trained."""
    n_bytes = sum(
        recipe.row_length(step) * max(1, recipe.step_bytes // recipe.row_length(step))
        for step in range(recipe.steps)
    )
    return (
        f"Seed {recipe.seed}, {recipe.steps} steps, {n_bytes / 1e6:.1f} MB of text drawn at random "
        f"from the training split: rows of {recipe.row_bytes} bytes, every fourth step one of "
        f"{recipe.step_bytes} or {recipe.longest_row_bytes}. {recipe.repeat_share:.0%} of the rows "
        f"repeat their own first {recipe.shortest_repeat_bytes} or more bytes. Muon "
        f"({recipe.matrix_rate}) on the matrices, AdamW ({recipe.other_rate}) on the rest, bf16 "
        f"autocast; {cpu_s:.0f} CPU seconds on one core."
    )


def main() -> None:
    """Train, then write the model, its configuration and its card."""
    parser = argparse.ArgumentParser(description="Train the tiny byte-level Llama.")
    parser.add_argument("folder", type=pathlib.Path, help="where the model is written")
    folder = parser.parse_args().folder
    torch.set_num_threads(1)  # matrices this small only lose time to a second thread
    shape, recipe = Shape(), Recipe()
    started_s = time.process_time()
    model = train(shape, recipe)
    export(folder, model, shape, training_facts(recipe, time.process_time() - started_s))


if __name__ == "__main__":
    main()
