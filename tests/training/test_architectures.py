"""Every causal language model of transformers that can be made small: packed it is what it is padded, or it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from test_packed import gradients, padded
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from longrein.training.logprobs import PackedRows, Packing, carry_packed_passes, packed_scores
from longrein.training.packed import packed_hidden
from longrein.training.tree import PrefixTree
from longrein.training.way import way_for

SMALL: dict[str, Any] = (
    dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64)
    | dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "attention_hidden_size", "lru_width"), 32)
    | dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 48)
    | dict.fromkeys(("ffn_hidden_size", "intermediate_size_mlp"), 48)
    | dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
    | dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "linear_num_key_heads"), 2)
    | dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 8)
    | dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "rotary_dim"), 8)
    | dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_chunk_size", "chunk_size"), 8)
    | dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "linear_num_value_heads", "state_size"), 4)
    | dict.fromkeys(("mamba_d_state", "ssm_state_size", "index_topk"), 4)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
    | dict.fromkeys(("max_position_embeddings", "n_positions"), 512)
    | dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1)
    | dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "hidden_dropout_prob"), 0.0)
    | dict.fromkeys(("attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout"), 0.0)
    | dict.fromkeys(("embedding_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0)
    | {"sliding_window": 5, "mamba_d_ssm": 64, "use_mamba_kernels": False, "is_decoder": True, "pad_token_id": None}
    | {"layer_types": None, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "num_nextn_predict_layers": 0}
    | {"index_n_heads": 2, "index_head_dim": 8}
)
EQUAL = """
afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 diffllama
dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4
glm4_moe gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
hyperclovax jetmoe llama minicpm3 minimax_m2 ministral mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe opt
persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
"""
REFUSED = """
bailing_hybrid bamba bert big_bird bloom codegen cpmant deepseek_v32 deepseek_v4 doge electra ernie falcon falcon_h1
falcon_mamba glm_moe_dsa gpt_neox_japanese gpt_oss gptj granitemoehybrid jamba lfm2 llama4_text mamba mamba2 megatron-bert
minimax mpt nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma roformer rwkv xlnet xlstm
"""
OTHERS: dict[str, dict[str, Any]] = {  # where the sizes above do not fit together; `...` for the model's own
    "axk1": {"num_key_value_heads": 4, "head_dim": 4},
    "bamba": {"layer_types": ...},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4},
    "deepseek_v32": {"num_key_value_heads": 4},
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon": {"head_dim": ...},
    "falcon_h1": {"layer_types": ...},
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layer_types": ["mamba", "attention"]},
}


def small(name: str) -> tf.PreTrainedModel:
    """A model of two small layers, in training, whose weights are wide enough that every part of it matters."""
    kind = tf.CONFIG_MAPPING[name]
    known = vars(kind()) | getattr(kind, "attribute_map", {})
    fitting = {
        key: value for key, value in SMALL.items() if known.get(key) is not None or key in ("head_dim", "pad_token_id")
    }
    sizes = {key: value for key, value in (fitting | OTHERS.get(name, {})).items() if value is not ...}
    torch.manual_seed(0)
    model = getattr(tf, CLASSES[name])(kind(**sizes))
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.15)
    return model.train()


def forked() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    rows = [rng.integers(3, 60, 40)]
    for _ in range(6):
        trunk = rows[rng.integers(len(rows))]
        rows.append(np.concatenate([trunk[: rng.integers(1, len(trunk) + 1)], rng.integers(3, 60, rng.integers(3, 30))]))
    return rows


@pytest.mark.parametrize("name", EQUAL.split())
def test_packed_equals_padded(name):
    model = small(name)
    assert way_for(model) == ("tree", "")
    rows = forked()
    tree = PrefixTree.of(rows)
    hidden = packed_hidden(model, tree)
    found = gradients(model, [hidden[torch.as_tensor(places)] for places in tree.places])
    expected = gradients(model, padded(model, rows))
    assert found.keys() == expected.keys()
    floor = 1e-2 * max(grad.norm() for grad in expected.values())  # the bias of keys has no gradient but rounding
    for key, grad in expected.items():
        assert (found[key] - grad).norm() < 3e-5 * grad.norm().clamp(min=floor), key
    logps = log_probabilities(model, rows)
    for row, logits, own in zip(rows, padded_logits(model, rows), logps, strict=True):
        expected_logps = torch.log_softmax(logits.float(), -1)[torch.arange(len(row) - 1), torch.as_tensor(row[1:])]
        torch.testing.assert_close(own, expected_logps, rtol=1e-5, atol=2e-5)


def log_probabilities(model, rows) -> list[torch.Tensor]:
    """Of every token but the first of each row, by the pass that training runs."""
    ids, mask = filled(rows)
    scored = mask.astype(bool)
    carry_packed_passes(model)
    packed = PackedRows(ids, scored)
    values = packed.spread(packed_scores(model, packed, Packing()).logps, ids.shape)
    return [one[1 : len(row)] for one, row in zip(values, rows, strict=True)]


def padded_logits(model, rows) -> list[torch.Tensor]:
    ids, mask = (torch.as_tensor(one) for one in filled(rows))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [one[: len(row) - 1] for one, row in zip(logits, rows, strict=True)]


def filled(rows) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = (np.zeros((len(rows), max(map(len, rows))), np.int64) for _ in range(2))
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    return ids, mask


@pytest.mark.parametrize("name", REFUSED.split())
def test_what_packing_would_get_wrong_is_padded(name):
    model = small(name)
    model(input_ids=torch.as_tensor(forked()[0])[None], use_cache=False)  # it is no model that does not run
    way = way_for(model)
    assert way.name == "padded"
    assert way.reason
