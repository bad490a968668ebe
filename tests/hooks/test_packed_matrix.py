"""Every causal architecture of the installed transformers, packed or apart: `pytest -m matrix`.

What cannot be built small, or is not served from pages at all, is skipped with its reason.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flowkv.hooks.huggingface import make_runner_parts
from tests.hooks import models
from tests.hooks.compare import attached, generate
from tests.hooks.serving import runner_of, serve
from tests.hooks.test_matrix import tiny
from tests.inside import ConfigError

PROMPTS = ((5, 1), (70, 2), (33, 3), (50, 4))


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_serves_its_own_tokens(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny(name)
            weight = model.get_input_embeddings().weight.data
            weight[0] = weight[-1]  # that of padding is zero: an indexer would choose among ties
            prompts = [models.prompt(*made) for made in PROMPTS]
            prompts.append(torch.cat([prompts[1][:, :48], prompts[2][:, :20]], 1))
            wanted = [
                generate(model, 12, input_ids=ids).sequences[0, ids.shape[1] :].tolist()
                for ids in prompts
            ]
        except Exception as error:  # it needs a configuration of its own, or cannot run alone
            pytest.skip(f"cannot be built small: {type(error).__name__}: {str(error)[:80]}")
        with attached(model) as kv:
            try:
                parts = make_runner_parts(model, kv)
            except ConfigError as error:
                pytest.skip(f"not served from pages: {error}")
            print(f"{name}: {parts.reason or 'packed'}")
            texts = [ids[0].tolist() for ids in prompts]
            for seed in (0, 1):
                assert serve(runner_of(parts, kv), texts, 12, seed=seed) == wanted
