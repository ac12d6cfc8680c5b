"""Packed equals padded: hidden states and the gradient of every parameter, for any rows; and what cannot be packed is not."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.overrides import TorchFunctionMode

from longrein.contract import LongreinError
from longrein.training import tree_kernels
from longrein.training.packed import _compiles, _spares, decoder_of, packed_hidden
from longrein.training.tree import PrefixTree
from longrein.training.tree_kernels import Cascade
from longrein.training.way import way_for

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HEADS = SHAPE | {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALTERNATING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(np.array), min_size=1, max_size=6)


@st.composite
def forked_rows(draw) -> list[np.ndarray]:
    """Rows of many different tokens, each forking from one before it: no gradient is zero but for rounding."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [rng.integers(0, 40, rng.integers(4, 12))]
    for _ in range(draw(st.integers(1, 5))):
        trunk = rows[rng.integers(len(rows))]
        rows.append(np.concatenate([trunk[: rng.integers(len(trunk) + 1)], rng.integers(0, 40, rng.integers(3, 12))]))
    return rows


def made(name: str, **changes) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = {
        "qwen3": lambda: tf.Qwen3Config(**HEADS | changes),
        "llama": lambda: tf.LlamaConfig(**SHAPE, **changes),
        "mistral": lambda: tf.MistralConfig(**HEADS, sliding_window=4, **changes),
        "gemma2": lambda: tf.Gemma2Config(**HEADS, **ALTERNATING, attn_logit_softcapping=0.5, attn_implementation="eager", **changes),
        "gemma3": lambda: tf.Gemma3TextConfig(**HEADS, **ALTERNATING, **changes),
        "gpt2": lambda: tf.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, **changes),
        "deepseek_v3": lambda: tf.DeepseekV3Config(
            **SHAPE | {"num_key_value_heads": 4}, **EXPERTS, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=6,
            qk_nope_head_dim=4, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, **changes),
        "qwen3_moe": lambda: tf.Qwen3MoeConfig(**HEADS, **EXPERTS, num_experts=4, **changes),
        "mixtral": lambda: tf.MixtralConfig(**HEADS, num_local_experts=4, **changes),
        "gpt_oss": lambda: tf.GptOssConfig(**HEADS, num_local_experts=4, num_experts_per_tok=2, **changes),
        "llama4": lambda: tf.Llama4TextConfig(**HEADS, num_local_experts=2, intermediate_size_mlp=48, **changes),
        "bloom": lambda: tf.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4, **changes),
        "mamba": lambda: tf.MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4, **changes),
        "rwkv": lambda: tf.RwkvConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, **changes),
        "falcon_h1": lambda: tf.FalconH1Config(
            **HEADS, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_state=8, mamba_d_head=8, mamba_chunk_size=8, **changes),
        "jamba": lambda: tf.JambaConfig(**SHAPE, use_mamba_kernels=False, num_experts=2, mamba_d_state=4, **changes),
        "minimax": lambda: tf.MiniMaxConfig(**HEADS, num_local_experts=2, **changes),
        "qwen3_next": lambda: tf.Qwen3NextConfig(
            **HEADS, **EXPERTS, num_experts=4, shared_expert_intermediate_size=16, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, **changes),
    }[name]()  # fmt: skip
    config.pad_token_id = None
    model = tf.AutoModelForCausalLM.from_config(config).train()
    if config.dtype == torch.float64:
        for module in (*model.model.layers, model.model.norm):
            module.forward = InFloat64.of(module.forward)
    return model


policy = cache(made)
EXACT = ("qwen3", "llama", "mistral", "gemma2", "gemma3")


class InFloat64(TorchFunctionMode):
    """Where transformers computes a norm or a softmax in float32 whatever it is given, float64 stays float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(args[0] if args else None, torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        return func(*args, **kwargs)

    @classmethod
    def of(cls, forward):
        def inside(*args, **kwargs):
            with cls():
                return forward(*args, **kwargs)

        return inside


def loss_of(hidden: list[torch.Tensor]) -> torch.Tensor:
    """Of each row's hidden states: a row's gradient differs from its twin's, and a token's from its neighbour's."""
    noise = torch.Generator().manual_seed(1)
    weights = [torch.randn(row.shape, generator=noise, dtype=torch.float64).to(row) for row in hidden]
    return sum((torch.sin(row * weight) * weight).sum() for row, weight in zip(hidden, weights, strict=True))


def padded(model, rows) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    lengths = [len(row) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.long, device=device)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.as_tensor(row), 1
    hidden = decoder_of(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    return [row[:length] for row, length in zip(hidden, lengths, strict=True)]


def packed(model, rows, share=True, backend="auto") -> list[torch.Tensor]:
    tree = PrefixTree.of(rows, share=share)
    hidden = packed_hidden(model, tree, backend=backend)
    return [hidden[torch.as_tensor(places, device=hidden.device)] for places in tree.places]


def gradients(model, hidden) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(hidden).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(model, rows, **how) -> float:
    """The worst of all parameters: the norm of the gradients' difference over the gradient's norm."""
    expected, found = gradients(model, padded(model, rows)), gradients(model, packed(model, rows, **how))
    assert expected.keys() == found.keys()
    floor = 1e-5 * max(grad.norm() for grad in expected.values())  # a gradient that is zero but for rounding
    return max(((found[name] - grad).norm() / grad.norm().clamp(min=floor)).item() for name, grad in expected.items())


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=12, deadline=None)
@given(rows=ROWS, share=st.booleans())
def test_in_float64_every_gradient_is_that_of_the_padded_pass(name, rows, share):
    model = policy(name, dtype=torch.float64)
    assert difference(model, rows, share=share) < 1e-10


@pytest.mark.parametrize("name", [*EXACT, "qwen3_moe", "mixtral", "deepseek_v3"])
@settings(max_examples=6, deadline=None)
@given(rows=forked_rows())
def test_in_float32_every_gradient_is_that_of_the_padded_pass(name, rows):
    assert difference(policy(name), rows) < 1e-5


@pytest.mark.parametrize("few", [0, tree_kernels.FEW])
@pytest.mark.parametrize("name", [*EXACT, "qwen3_moe", "mixtral", "deepseek_v3", "gpt2"])
@settings(max_examples=4, deadline=None)
@given(rows=forked_rows(), chosen=st.integers(0, 2**32))
def test_the_last_layer_is_computed_where_it_is_needed(name, few, rows, chosen):
    model = policy(name).eval()  # gpt2 drops out
    assert _spares(model)
    tree = PrefixTree.of(rows)
    needed = np.random.default_rng(chosen).integers(0, len(tree), 1 + chosen % len(tree))  # some of them twice
    needed = np.append(needed, tree.positions.argmax())  # of first tokens alone, a query's gradient is rounding and no more
    expected = gradients(model, [packed_hidden(model, tree)[needed]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_kernels, "FEW", few)
        found = gradients(model, [packed_hidden(model, tree, needed=needed)])
    assert expected.keys() == found.keys()
    floor = 1e-2 * max(grad.norm() for grad in expected.values())
    for key, grad in expected.items():
        assert (found[key] - grad).norm() < 1e-5 * grad.norm().clamp(min=floor), key


def test_the_last_layers_products_are_of_what_is_needed():
    model = made("qwen3")
    seen = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[1]))
    assert _spares(model)
    seen.clear()
    packed_hidden(model, PrefixTree.of([np.arange(9), np.arange(5)]), needed=np.array([4, 8, 8]))
    assert seen == [9, 2]


def test_a_last_layer_that_needs_all_of_its_tokens_gets_them():
    class Centred(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return self.inner(hidden) - hidden.mean(1, keepdim=True)

    model = made("llama")
    model.model.layers[1].mlp = Centred(model.model.layers[1].mlp)
    tree = PrefixTree.of([np.arange(9)])
    assert not _spares(model)
    assert torch.equal(packed_hidden(model, tree, needed=np.array([3])), packed_hidden(model, tree)[[3]])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@settings(max_examples=5, deadline=None)
@given(rows=ROWS)
def test_gradient_checkpointing_changes_nothing(name, reentrant, rows):
    model = policy(name, dtype=torch.float64, bos_token_id=int(reentrant))  # a model of its own
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert difference(model, rows) < 1e-10


@settings(max_examples=6, deadline=None)
@given(rows=forked_rows())
def test_adapters_get_the_gradient_of_the_padded_pass(rows):
    model = adapted(dropout=0.0).train()
    assert way_for(model).name == "tree"
    assert difference(model, rows) < 1e-5


@cache
def adapted(dropout: float):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=dropout, init_lora_weights=False)
    return get_peft_model(made("qwen3"), lora)


@settings(max_examples=5, deadline=None)
@given(rows=forked_rows())
def test_under_bf16_autocast_it_is_as_near_as_bf16_is(rows):
    model = policy("qwen3")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = padded(model, rows), packed(model, rows)
        for row, other in zip(expected, found, strict=True):
            assert ((other - row).norm() / row.norm()).item() < 0.03
        before, after = gradients(model, expected), gradients(model, found)
    whole = torch.cat([grad.flatten() for grad in before.values()])
    assert ((torch.cat([grad.flatten() for grad in after.values()]) - whole).norm() / whole.norm()).item() < 0.05


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_run_again_does_not_attend_again(reentrant, monkeypatch):
    model = made("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    calls, attend = [], Cascade.forward
    monkeypatch.setattr(Cascade, "forward", lambda *args: calls.append(1) or attend(*args))
    gradients(model, packed(model, [np.arange(9), np.arange(5)]))
    assert len(calls) == 2  # layers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_on_a_gpu_are_as_near_to_float32_as_plain_ones(checkpointing):
    rows = [np.concatenate([np.arange(20), n + np.arange(10)]) % 40 for n in range(4)]
    model = made("qwen3", head_dim=16).cuda()
    exact = gradients(model, padded(model, rows))
    model.bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found = [gradients(model, hidden()) for hidden in (lambda: padded(model, rows), lambda: packed(model, rows))]
    errors = [sum((grads[name].float() - grad).norm() ** 2 for name, grad in exact.items()) for grads in found]
    assert errors[1] < 1.3 * errors[0]


class BreaksBackward(torch.autograd.Function):
    """Layers whose backward pass a compiler does not get."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("no kernel for this backward pass")


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("breaks", [None, "forward", "backward"])
def test_layers_that_do_not_compile_run_as_they_are(breaks, reentrant, monkeypatch, caplog):
    def compiled(forward, **options):
        def run(hidden, *args, **kwargs):
            if breaks == "forward":
                raise RuntimeError("no kernel for this forward pass")
            return forward(BreaksBackward.apply(hidden) if breaks else hidden, *args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    model = made("qwen3")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = switches(model)
    assert _compiles(model) is (breaks is None)
    assert _compiles(model) is (breaks is None)
    said = [record.getMessage() for record in caplog.records if "do not compile" in record.getMessage()]
    assert len(said) == (breaks is not None)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert switches(model) == before
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [reentrant is not None] * 2


def test_long_rows_with_long_windows():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 40, 300)
    rows = [np.concatenate([trunk[:cut], rng.integers(0, 40, 150)]) for cut in (300, 290, 150, 40, 300)]
    for name, window in (("mistral", 100), ("mistral", 200), ("gemma3", 150), ("qwen3", None)):
        changes = {} if window is None else {"sliding_window": window}
        model = made(name)
        for part in model.modules():
            if hasattr(part, "config"):
                vars(part.config).update(changes)
        assert difference(model, rows) < 1e-5


# ---- which way


@pytest.mark.parametrize("name", [*EXACT, "qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_keys_goes_through_the_tree(name, dtype):
    assert way_for(made(name).to(dtype)) == ("tree", "")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", "convolution over tokens"),
        ("falcon_h1", "convolution over tokens"),
        ("jamba", "convolution over tokens"),
        ("qwen3_next", "convolution over tokens"),
        ("rwkv", "time_shift gives by"),  # a recurrence
        ("minimax", "self_attn.norm gives by"),  # linear attention
        ("bloom", "self_attention.dense gives by"),  # positions in the scores
        ("gpt_oss", "s_aux"),  # attention sinks
        ("llama4", "neither causal nor a sliding window"),  # chunks of 8192
    ],
)
def test_what_is_not_attention_over_keys_alone_is_padded(name, reason, caplog):
    model = made(name)
    with caplog.at_level(logging.WARNING):
        way = way_for(model)
        assert way_for(model) is way
    assert way.name == "padded"
    assert reason in way.reason
    assert [way.reason in record.getMessage() for record in caplog.records if "longrein" in record.name] == [True]


@pytest.mark.parametrize(
    ("make", "training", "other"),
    [
        (lambda: adapted(0.1), ("packed", "lora_dropout"), ("tree", "")),
        (lambda: made("gpt2", attn_pdrop=0.0), ("packed", "drops out 0.1"), ("tree", "")),
        (lambda: made("llama", attention_dropout=0.1), ("padded", "attention_dropout is 0.1"), ("tree", "")),
        (lambda: made("mixtral", router_jitter_noise=0.1), ("packed", "router_jitter_noise"), ("tree", "")),
        (lambda: made("qwen3_moe", output_router_logits=True), ("padded", "load-balancing"), ("padded", "load-balancing")),
    ],
)
def test_what_is_random_or_counted_by_row_is_not_shared(make, training, other):
    model = make()
    for mode, (name, reason) in ((True, training), (False, other)):
        way = way_for(model.train(mode))
        assert way.name == name
        assert reason in way.reason


def test_virtual_tokens_are_padded():
    model = get_peft_model(made("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert way_for(model).name == "padded"


def test_a_layer_that_mixes_tokens_is_found_though_its_output_is_multiplied_by_zero():
    class Shifted(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.shift, self.gate = inner, torch.nn.Identity(), torch.nn.Parameter(torch.zeros(()))

        def forward(self, hidden):
            return self.inner(hidden) + self.gate * self.shift(torch.nn.functional.pad(hidden, (0, 0, 1, -1)))

    model = made("llama")
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    way = way_for(model)
    assert way.name == "padded"
    assert "layers.1.mlp.shift" in way.reason


def test_looking_leaves_the_model_as_it_was():
    model = made("qwen3")
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    noise = torch.get_rng_state()
    assert way_for(model).name == "tree"
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), noise)
    assert not any(module._forward_hooks for module in model.modules())


# ---- a pass


def switches(model) -> list[tuple]:
    parts = [part for part in model.modules() if hasattr(part, "config")]
    return [(part.config._attn_implementation, vars(part).get("_gradient_checkpointing_func")) for part in parts]


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])  # one that passes, one that fails in the middle
def test_after_a_pass_the_model_is_as_before(name):
    model = made(name)
    model.gradient_checkpointing_enable()
    row = np.arange(7)
    before = switches(model)
    with pytest.raises(LongreinError, match="s_aux") if name == "gpt_oss" else nullcontext():
        packed(model, [row])
    assert switches(model) == before
    assert before[0][0] in ("sdpa", "eager")


def test_nothing_to_forward_and_an_unknown_back_end_are_refused():
    with pytest.raises(LongreinError, match="every row given is empty"):
        packed_hidden(policy("qwen3"), PrefixTree.of([np.array([], int)]))
    with pytest.raises(LongreinError, match="no attention back end is called 'fast'; there are: auto, "):
        packed_hidden(policy("qwen3"), PrefixTree.of([np.arange(3)]), backend="fast")


def test_dropout_is_never_silently_left_out():
    with pytest.raises(LongreinError, match="attention dropout of 0.1"):
        packed(made("llama", attention_dropout=0.1), [np.arange(5)])
