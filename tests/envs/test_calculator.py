"""Orders added up with the calculator, by scripts that read what the tools say."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longrein import Agent
from longrein.engines.scripted import ScriptedEngine
from longrein.envs.calculator import Calculator, value
from longrein.envs.environment import EnvConfigError


def call(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def shopper(messages, tools):
    """Looks every price up, computes once, and says the result."""
    assert [schema["function"]["name"] for schema in tools] == ["calculate", "price"]
    order = [(item, int(count)) for count, item in re.findall(r"(\d+) x (\w+)", messages[0]["content"])]
    told = [message["content"] for message in messages if message["role"] == "tool"]
    if len(told) < len(order):
        return call("price", item=order[len(told)][0])
    if len(told) == len(order):
        goods = " + ".join(f"{count} * {price}" for (_, count), price in zip(order, told, strict=True))
        discount, delivery = re.search(r"gets (\d+) %.*pays (\d+) for", messages[0]["content"]).groups()
        return call("calculate", expression=f"({goods}) * (1 - {discount} / 100) + {delivery}")
    return f"It pays {told[-1]}."


@pytest.fixture
def play(tokenizer, rendering):
    def run(script, tasks, num_rollouts=1, **env_config):
        agent = Agent(None, tokenizer("qwen3"), engine=ScriptedEngine(script, rendering("qwen3")))
        env = Calculator(tokenizer=tokenizer("qwen3"), env_config=env_config)
        rollouts = env.run_trial(tasks, agent, num_rollouts)["rollouts"]
        assert [rollout.failed for rollout in rollouts] == [None] * len(rollouts)
        return rollouts

    return run


def test_who_uses_the_tools_is_right_every_time(play):
    rollouts = play(shopper, Calculator.tasks(6), num_rollouts=2)
    assert [(rollout.reward, rollout.success, rollout.turns) for rollout in rollouts] == [(1.0, True, 5)] * 12
    assert all(len(rollout.rows()) == 1 for rollout in rollouts)


def test_who_guesses_is_wrong(play):
    assert [rollout.reward for rollout in play(["It pays 12345."], Calculator.tasks(4))] == [0.0] * 4
    assert [rollout.reward for rollout in play(["I do not know."], Calculator.tasks(2))] == [0.0] * 2


def test_an_order_has_as_many_items_as_the_config_says(play):
    (rollout,) = play(shopper, Calculator.tasks(1, env_config={"items": 5}), items=5)
    assert (rollout.reward, rollout.turns) == (1.0, 7)


def test_the_last_number_counts_with_or_without_a_thousands_comma(play):
    task = {"order": {"lamp": 10}, "prices": {"lamp": 250}, "discount": 10, "delivery": 100}
    for answer, reward in {"2350": 1.0, "2,350.00 in all": 1.0, "not 2350 but 2351": 0.0, "9" * 200: 0.0}.items():
        assert play([answer], [task])[0].reward == reward, answer


def test_a_tool_used_wrongly_says_so_and_the_episode_goes_on(play):
    wrong = [
        call("calculate", expression="__import__('os').getcwd()"),
        call("calculate", expression="1 / 0"),
        call("calculate", expr="1"),
        call("price", item="castle"),
        call("steal", item="lamp"),
        "0",
    ]
    (rollout,) = play(wrong, Calculator.tasks(1))
    told = [m["content"] for m in rollout.conversation(list(rollout.calls)[-1]) if m["role"] == "tool"]
    assert len(told) == 5
    assert all(text.startswith("error: ") for text in told)
    assert "none of + - * /" in told[0]
    assert "bench, carpet" in told[3]


@given(st.recursive(
    st.integers(0, 10**6).map(str) | st.decimals(0, 1000, places=2).map(str),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*/"), inner) | st.builds("-{}".format, inner),
    max_leaves=12,
))  # fmt: skip
def test_the_calculator_is_exact(expression):
    exact = re.sub(r"[\d.]+", lambda number: f"Fraction('{number[0]}')", expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            value(expression)
    else:
        assert value(expression) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2 +",
        "9 ** 9",
        "True",
        "'a' * 9",
        "x",
        "abs(1)",
        "[1][0]",
        "(1).real",
        "1 if 1 else 2",
        "(" * 300,
        "1e999",
        "1+" * 400,
    ],
)
def test_what_is_not_arithmetic_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        value(text)


def test_tasks_come_from_the_seed_and_rows_carry_the_config():
    assert Calculator.tasks(5, seed=1) == Calculator.tasks(5, seed=1) != Calculator.tasks(5, seed=2)
    rows = Calculator.get_train_dataset(5, seed=1, env_config={"items": 2})
    assert rows.column_names == ["env_class_path", "env_config", "task_data"]
    assert rows[0]["env_class_path"] == "longrein.envs.calculator.Calculator"
    assert rows[0]["env_config"] == {"items": 2}
    assert rows["task_data"][:] == Calculator.tasks(5, seed=1, env_config={"items": 2})


def test_bad_settings_and_tasks_are_refused(tokenizer, play):
    with pytest.raises(EnvConfigError, match="items is 0; it must be a whole number from 1 to 12"):
        Calculator(tokenizer=tokenizer("qwen3"), env_config={"items": 0})
    with pytest.raises(EnvConfigError, match="Did you mean 'items'"):
        Calculator(tokenizer=tokenizer("qwen3"), env_config={"itms": 2})
    env = Calculator(tokenizer=tokenizer("qwen3"))
    with pytest.raises(Exception, match="task_data has no 'delivery'"):
        env.episode({"order": {}}).start()
