"""The head gives what full logits would give, in values and gradients, in every way it has."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from longrein.training import head as heads
from longrein.training.head import Form, Head

PAIRS, WIDTH, VOCABULARY = 37, 16, 50
FORMS = [Form(), Form(temperature=0.7), Form(0.5, 3.0, 1.3)]
TARGETS = torch.randint(VOCABULARY, (PAIRS,), generator=torch.Generator().manual_seed(0))
SLOPES, ENTROPY_SLOPES = torch.randn((2, PAIRS), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    monkeypatch.setattr(heads, "tokens_a_tile", lambda device, vocabulary, tokens: 10)


def parts(bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype), torch.randn(PAIRS, WIDTH, dtype=dtype, requires_grad=True)


def by_full_logits(module, hidden, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    logits = module(hidden) * form.scale
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    logps = torch.log_softmax(logits / form.temperature, -1)
    return logps.gather(1, TARGETS[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


def gradients(loss: torch.Tensor, module: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *(one for one in module.parameters() if one.requires_grad)]))


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bonus", [False, True])
def test_values_and_gradients_are_those_of_full_logits(form, bias, frozen, bonus):
    module, hidden = parts(bias)
    module.requires_grad_(not frozen)
    logps, entropies = by_full_logits(module, hidden, form)
    loss = (logps * SLOPES).sum() + ((entropies * ENTROPY_SLOPES).sum() if bonus else 0)
    expected = gradients(loss, module, hidden)

    any_loss = Head(module, form).score(hidden, TARGETS)
    close([any_loss.logps, any_loss.entropies], [logps, entropies])
    loss = (any_loss.logps * SLOPES).sum() + ((any_loss.entropies * ENTROPY_SLOPES).sum() if bonus else 0)
    close(gradients(loss, module, hidden), expected)

    formed = Head(module, form).score(
        hidden, TARGETS, slope=lambda logps, a, b: (SLOPES[a:b], ENTROPY_SLOPES[a:b] if bonus else None)
    )
    close([formed.logps, formed.entropies], [logps, entropies])
    close(gradients(3 * formed.surrogate, module, hidden), [3 * one for one in expected])


@pytest.mark.parametrize("form", FORMS)
def test_a_slope_may_depend_on_the_log_probability(form):
    module, hidden = parts()
    logps, _ = by_full_logits(module, hidden, form)
    expected = gradients(torch.exp(logps * 0.5).sum(), module, hidden)
    formed = Head(module, form).score(hidden, TARGETS, slope=lambda logps, a, b: (0.5 * torch.exp(logps * 0.5), None))
    close(gradients(formed.surrogate, module, hidden), expected)


def test_an_adapter_on_the_head_is_gone_through():
    model = nn.ModuleDict({"lm_head": parts()[0]})
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"]))  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    module, hidden = model["lm_head"].double(), parts()[1]
    assert not Head(module).plain
    logps, entropies = by_full_logits(module, hidden, FORMS[2])
    expected = gradients((logps * SLOPES).sum() + entropies.sum(), module, hidden)
    scores = Head(module, FORMS[2]).score(hidden, TARGETS)
    close(gradients((scores.logps * SLOPES).sum() + scores.entropies.sum(), module, hidden), expected)
    formed = Head(module, FORMS[2]).score(
        hidden, TARGETS, slope=lambda logps, a, b: (SLOPES[a:b], torch.ones(b - a, dtype=torch.float64))
    )
    close(gradients(formed.surrogate, module, hidden), expected)


def test_a_hook_on_the_head_is_seen():
    module, hidden = parts()
    plain = Head(module).score(hidden, TARGETS).logps
    module.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(Head(module).score(hidden, TARGETS).logps, by_full_logits(module, hidden, Form())[0])
    assert not torch.allclose(Head(module).score(hidden, TARGETS).logps, plain)


def test_nothing_scored_is_a_gradient_of_zero():
    module, hidden = parts()
    none = torch.zeros(0, dtype=torch.long)
    scores = Head(module).score(hidden[none], none, slope=lambda logps, a, b: (logps, None))
    assert all((one == 0).all() for one in gradients(scores.surrogate, module, hidden))
    assert all((one == 0).all() for one in gradients(Head(module).score(hidden[none], none).logps.sum(), module, hidden))


def test_half_precision_is_projected_in_it_and_summed_in_float32():
    module, hidden = parts(dtype=torch.float32)
    exact = by_full_logits(module, hidden, Form())[0]
    with torch.autocast("cpu", torch.bfloat16):
        half = Head(module).score(hidden, TARGETS).logps
        full = Head(module, float32=True).score(hidden, TARGETS).logps
    assert half.dtype == full.dtype == torch.float32
    assert 1e-5 < (half - exact).abs().max() < 0.1
    torch.testing.assert_close(full, exact)


def test_the_form_is_read_from_the_model(random_model):
    import transformers as tf

    shape = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = tf.Gemma2ForCausalLM(tf.Gemma2Config(**shape, num_key_value_heads=1, head_dim=8, final_logit_softcapping=7.0))
    cohere = tf.CohereForCausalLM(tf.CohereConfig(**shape, logit_scale=0.25))
    granite = tf.GraniteForCausalLM(tf.GraniteConfig(**shape, logits_scaling=4.0))
    assert Head.of(gemma, temperature=0.5).form == Form(1.0, 7.0, 0.5)
    for model in (gemma, cohere, granite, random_model(vocab_size=40)):
        ids = torch.arange(10, 20)[None]
        with torch.no_grad():
            expected = torch.log_softmax(model.eval()(input_ids=ids).logits[0, :-1].float(), -1)
            hidden = model.get_decoder()(input_ids=ids).last_hidden_state[0, :-1]
            found = Head.of(model).score(hidden, ids[0, 1:]).logps
        torch.testing.assert_close(found, expected.gather(1, ids[0, 1:, None])[:, 0], rtol=1e-5, atol=1e-5)


def test_a_formed_gradient_is_taken_once():
    module, hidden = parts()
    surrogate = Head(module).score(hidden, TARGETS, slope=lambda logps, a, b: (SLOPES[a:b], None)).surrogate
    surrogate.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        surrogate.backward()


def test_the_first_product_of_a_sum_takes_the_place_of_what_stood_there():
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    total = torch.full((3, 2), torch.nan)
    heads._add_product(total, a, b, first=True)
    heads._add_product(total, a, b, first=False)
    torch.testing.assert_close(total, 2 * (a @ b))
