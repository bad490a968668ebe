"""Every causal architecture of the installed transformers, tiny and random: `pytest -m matrix`.

What cannot be built small is skipped with its reason. Takes some minutes on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.hooks import models
from tests.hooks.compare import attached, generate, reused
from tests.inside import Identity, door_of

LAYERS = 4
SIZES: dict[int, str] = {
    2: """num_key_value_heads num_query_groups num_experts_per_tok moe_topk moe_k
        linear_num_key_heads num_experts_per_token""",
    LAYERS: """num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        num_local_experts num_experts n_routed_experts moe_num_experts linear_num_value_heads
        mamba_num_heads mamba_n_heads conv_kernel""",
    8: "mamba_dt_rank time_step_rank index_topk",
    16: """head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank
        mamba_d_state ssm_state_size state_size linear_key_head_dim linear_value_head_dim
        mamba_head_dim index_head_dim index_n_heads query_pre_attn_scalar
        hidden_size_per_layer_input dim_head""",
    24: "sliding_window attention_window attention_window_size local_attention_size window_size",
    32: "q_lora_rank moe_intermediate_size shared_expert_intermediate_size mamba_d_head",
    64: "hidden_size n_embd d_model word_embed_proj_dim lru_width",
    128: """intermediate_size n_inner ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim mamba_d_ssm""",
    256: "vocab_size vocab_size_per_layer_input",
    1024: "max_position_embeddings n_positions",
}
ONES = "n_group topk_group n_shared_experts first_k_dense_replace mamba_n_groups n_groups"


def tiny(name: str) -> torch.nn.Module:
    """A model of this type with a few thousand parameters a layer."""
    plain = CONFIG_MAPPING[name]()
    text = plain.get_text_config(decoder=True)
    known = text.to_dict()
    fields: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    for value, names in SIZES.items():
        fields |= {field: value for field in names.split()}
    fields |= dict.fromkeys(ONES.split(), 1)
    fields = {
        field: value
        for field, value in fields.items()
        if known.get(field) is not None and not isinstance(known[field], (dict, list))
    }
    if "kv_lora_rank" in known:
        fields["num_key_value_heads"] = LAYERS
    for field in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"):
        listed = known.get(field)
        if isinstance(listed, list) and len(listed) > LAYERS:
            kinds = list(dict.fromkeys(map(str, listed)))
            spread = [next(x for x in listed if str(x) == kinds[i % len(kinds)]) for i in range(4)]
            fields[field] = spread
    config = type(text)(**fields)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > 2e7:
        raise ValueError(f"{size:,} parameters are left")
    torch.manual_seed(0)
    return models.sharpen(cls(config))


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_gives_its_own_tokens(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, prompt = tiny(name), models.prompt(70)
            first = generate(model, input_ids=prompt)
            longer = torch.cat([first.sequences, models.prompt(15, seed=2)], 1)
            second = generate(model, input_ids=longer)
        except Exception as error:  # it needs a configuration of its own, or cannot run alone
            pytest.skip(f"cannot be built small: {type(error).__name__}: {str(error)[:80]}")
        with attached(model):
            for ids, theirs in ((prompt, first), (longer, second)):
                assert torch.equal(generate(model, input_ids=ids).sequences, theirs.sequences)


NAMES = """
import json, sys, warnings
import torch
from tests.conftest import poisoned
warnings.simplefilter("ignore")
torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)  # as tests have
torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)
from tests.hooks.compare import attached
from tests.hooks.test_matrix import named, tiny
found = {}
for name in sys.argv[1:]:
    try:
        model = tiny(name)
        with attached(model):
            found[name] = named(model)
    except Exception:
        pass
print(json.dumps(found))
"""


def named(model: torch.nn.Module) -> str:
    """The name that pages of an attached model have; "" where attach leaves it alone."""
    door = door_of(model)
    return door.identity.namespace.digest().hex() if door is not None else ""


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest) -> dict[str, str]:
    """Names that another process gives, where sets and dicts of text have another order."""
    tests = [t for t in request.session.items if t.name.startswith("test_keeps_its_name")]
    done = subprocess.run(
        [sys.executable, "-c", NAMES, *(test.callspec.params["name"] for test in tests)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.matrix
@pytest.mark.parametrize("name", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_keeps_its_name(name: str, elsewhere: dict[str, str], tmp_path: Path) -> None:
    """In another process, after it was served, and so over a store after a restart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, prompt = tiny(name), models.prompt(70)
            generate(model, input_ids=prompt)
        except Exception as error:
            pytest.skip(f"cannot be built small: {type(error).__name__}: {str(error)[:80]}")
        place, reuse = f"{tmp_path}/kv:64MiB", []
        assert Identity(model).foreign == ""
        with attached(model, disk=place) as kv:
            assert named(model) == elsewhere[name]
            for _ in range(2):
                generate(model, input_ids=prompt)
            reuse.append(reused(kv))
        again = tiny(name)
        with attached(again, disk=place) as kv:
            generate(again, input_ids=prompt)
            reuse.append(reused(kv))
        with attached(model):
            assert named(model) == elsewhere[name]
    # Behind a window, the last page may be computed rather than loaded.
    assert reuse[0] - 16 <= reuse[1] <= reuse[0] and (reuse[1] > 0) == (reuse[0] > 0)
