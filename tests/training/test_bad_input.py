"""Bad input is refused with one sentence that names the thing: each line of the promise, with its message."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import parts
import pytest
from datasets import Dataset, IterableDataset
from worlds import Ask, NotAnEnvironment, Picky, Recording, Spoiled, Talk, row

from longrein import Agent, GRPOEnvConfig, LongreinError, Sampling
from longrein.envs import EnvConfigError, TreasureHunt, load_tasks, task_dataset
from longrein.envs.datasets import checked_row
from longrein.training.checks import ARGUMENTS, check_engine
from longrein.training.config import REFUSED

GOOD = [row(Ask, n=n) for n in range(2)]


# ---- rows


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("worlds.Missing", "env_class_path 'worlds.Missing': the module 'worlds' has no 'Missing'"),
        ("no_such_module.Env", "env_class_path 'no_such_module.Env' cannot be imported: No module named 'no_such_module'"),
        ("Talk", "env_class_path is 'Talk'; it must be a dotted path"),
        ("worlds.NotAnEnvironment", "'worlds.NotAnEnvironment' is no environment: it must be a class with `run_trial`"),
        ("worlds.row", "'worlds.row' is no environment"),
        ("worlds..Talk", "env_class_path 'worlds..Talk' cannot be imported"),
    ],
)
def test_unknown_or_wrong_environment_class(tmp_path, path, message):
    assert NotAnEnvironment
    rows = [{"env_class_path": path, "env_config": {}, "task_data": {}}] * 2
    with pytest.raises(LongreinError) as refused:
        parts.trainer(tmp_path, rows)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_turn": 3}, "TreasureHunt has no setting 'max_turn'. Did you mean 'max_turns'?"),
        ({"max_turns": 0}, "TreasureHunt refuses its env_config: max_turns is 0; it must be a whole number of 1 or more"),
        ({"credit": "none"}, "credit is 'none'; it must be one of spread, last, terminal"),
    ],
)
def test_a_config_that_the_environment_refuses(tmp_path, config, message):
    rows = [row(TreasureHunt, config, rooms=["attic"])] * 2
    with pytest.raises(EnvConfigError) as refused:
        parts.trainer(tmp_path, rows)
    assert message in str(refused.value)


def test_a_config_that_another_librarys_environment_refuses(tmp_path):
    trainer = parts.trainer(tmp_path, [row(Picky, {"board": 3})] * 2)
    with pytest.raises(LongreinError, match=r"worlds.Picky refuses env_config \{'board': 3\}: KeyError: 'board'"):
        trainer.train()


@pytest.mark.parametrize("column", ["env_class_path", "env_config", "task_data"])
def test_a_missing_column(tmp_path, column):
    rows = Dataset.from_list([{k: json.dumps(v) for k, v in one.items() if k != column} for one in GOOD])
    with pytest.raises(LongreinError, match=f"the dataset has no column {column}; it has .*Every row needs"):
        parts.trainer(tmp_path, rows)
    with pytest.raises(LongreinError, match=f"row 1 has no '{column}'"):
        task_dataset([GOOD[0], {k: v for k, v in GOOD[1].items() if k != column}])


@pytest.mark.parametrize("column", ["env_config", "task_data"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], r"is \[1, 2\]; it must be a dict, or the JSON of one"),
        ("[1, 2]", r"is \[1, 2\]; it must be a dict"),
        ("not json", "is not JSON"),
        (None, "is None; it must be a dict"),
        (7, "is 7; it must be a dict"),
    ],
)
def test_a_column_that_is_no_dict(tmp_path, column, value, message):
    with pytest.raises(LongreinError, match=f"row 1: {column} {message}"):
        task_dataset([GOOD[0], {**GOOD[1], column: value}])
    if isinstance(value, str):
        plain = Dataset.from_list(
            [{**{k: v if isinstance(v, str) else json.dumps(v) for k, v in one.items()}, column: value} for one in GOOD]
        )
        with pytest.raises(LongreinError, match=f"row 0: {column} {message}"):
            parts.trainer(tmp_path, plain)


@pytest.mark.parametrize("path", [None, "", 3])
def test_an_env_class_path_that_is_no_text(path):
    with pytest.raises(LongreinError, match="row 0: env_class_path is .*; it must be a dotted class path"):
        task_dataset([{**GOOD[0], "env_class_path": path}])


def test_images_are_refused(tmp_path):
    rows = Dataset.from_list(
        [{**{k: v if isinstance(v, str) else json.dumps(v) for k, v in one.items()}, "image": "x"} for one in GOOD]
    )
    with pytest.raises(LongreinError, match="the dataset has the column image: environments give text"):
        parts.trainer(tmp_path, rows)


# ---- datasets


def test_an_empty_dataset(tmp_path):
    with pytest.raises(LongreinError, match="the dataset is empty"):
        parts.trainer(tmp_path, [])


def test_no_dataset(tmp_path):
    with pytest.raises(LongreinError, match="train_dataset is missing; `Environment.get_train_dataset"):
        parts.trainer(tmp_path, None)


def test_a_dataset_too_small_for_a_generation_batch(tmp_path):
    with pytest.raises(LongreinError, match="has 2 rows and a generation batch needs 4 .*TRL would train 0 steps"):
        parts.trainer(tmp_path, GOOD, per_device_train_batch_size=8)


def test_an_evaluation_dataset_may_be_small_and_may_not_be_empty_or_wrong(tmp_path):
    parts.trainer(tmp_path, GOOD, options={"eval_dataset": task_dataset(GOOD[:1])})
    with pytest.raises(LongreinError, match="the dataset is empty"):
        parts.trainer(tmp_path, GOOD, options={"eval_dataset": {"a": task_dataset(GOOD), "b": task_dataset([])}})
    wrong = task_dataset([{**GOOD[0], "env_class_path": "worlds.Missing"}])
    with pytest.raises(LongreinError, match="has no 'Missing'"):
        parts.trainer(tmp_path, GOOD, options={"eval_dataset": wrong})


def test_fresh_tasks_cannot_be_drawn_from_a_stream(tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(GOOD))
    with pytest.raises(LongreinError, match="resample_flat_groups needs a dataset with a length"):
        parts.trainer(tmp_path, stream, resample_flat_groups=1)


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        ({"word": "a"}, {"size": 3}, "size"),
        ({"board": {"x": 1}}, {"board": {"y": 2}}, "board.y"),
        ({"items": [{"a": 1}]}, {"items": [{"b": 2}]}, "items.0.b"),
    ],
)
@pytest.mark.parametrize("column", ["env_config", "task_data"])
def test_dict_columns_that_datasets_filled_up_are_refused(tmp_path, column, first, second, field):
    rows = [{**row(Recording, n=1), column: first}, {**row(Recording, n=1), column: second}]
    other = "task_data" if column == "env_config" else "env_config"
    rows = [{**one, other: json.dumps({"n": 1})} for one in rows]
    with pytest.raises(LongreinError) as refused:
        parts.trainer(tmp_path, Dataset.from_list(rows))
    assert f"row 0: {column}['{field}'] is None" in str(refused.value)
    assert "longrein.envs.task_dataset(rows)" in str(refused.value)


def test_the_same_rows_through_the_named_helper_are_kept(tmp_path):
    rows = [
        {**row(Recording), "task_data": {"n": 1, "a": None}},
        {**row(Recording), "task_data": {"n": 2, "b": {"c": None}}},
    ]
    dataset = task_dataset(rows)
    assert list(dataset) == rows
    parts.trainer(tmp_path, dataset).train()
    assert Recording.trials[0][2] == [{"n": 1, "a": None}, {"n": 2, "b": {"c": None}}]


def test_json_strings_are_read(tmp_path):
    rows = [
        {k: v if isinstance(v, str) else json.dumps(v) for k, v in row(Recording, {"a": 1}, n=n).items()} for n in (1, 2)
    ]
    parts.trainer(tmp_path, Dataset.from_list(rows)).train()
    assert Recording.trials[0][1:3] == ({"a": 1}, [{"n": 1}, {"n": 2}])


def test_plain_dict_columns_where_merging_changed_nothing_are_read(tmp_path):
    rows = [row(Recording, {"a": 1}, n=n, words=["x", "y"]) for n in (1, 2)]
    parts.trainer(tmp_path, Dataset.from_list(rows)).train()
    assert Recording.trials[0][1:3] == ({"a": 1}, [{"n": 1, "words": ["x", "y"]}, {"n": 2, "words": ["x", "y"]}])


def test_numbers_keep_their_digits():
    task = {"third": 1 / 3, "small": 1e-9 / 3, "large": 2**70, "exact": 0.1}
    (kept,) = task_dataset([row(Recording, **task)])
    kept = checked_row(kept, 0)["task_data"]
    assert kept == pytest.approx(task, rel=1e-11, abs=0)
    assert kept["large"] == 2**70


def test_what_json_cannot_say_is_refused():
    with pytest.raises(LongreinError, match="row 0: task_data cannot be written as JSON .*set is not JSON serializable"):
        task_dataset([row(Recording, seen={1})])


def test_a_folder_or_file_that_cannot_be_read(tmp_path):
    (tmp_path / "broken.parquet").write_text("not parquet")
    for source in (tmp_path, tmp_path / "broken.parquet"):
        with pytest.raises(LongreinError, match=f"'{source}' cannot be read: "):
            load_tasks(str(source))


# ---- tokenizer, agent and model


def test_a_tokenizer_without_a_chat_template(tmp_path):
    bare = copy.deepcopy(parts.tokenizer())
    agent = parts.agent()
    bare.chat_template = None
    with pytest.raises(LongreinError, match="the tokenizer has no chat template; use an instruct model or set"):
        parts.trainer(tmp_path, GOOD, of=agent, tokenizer=bare)


def test_a_tokenizer_without_a_pad_token(tmp_path):
    bare = copy.deepcopy(parts.tokenizer())
    bare.pad_token = None
    with pytest.raises(LongreinError, match="the tokenizer has no pad token; set `tokenizer.pad_token`"):
        parts.trainer(tmp_path, GOOD, tokenizer=bare)


def test_an_agent_with_another_tokenizer(tmp_path):
    other = copy.deepcopy(parts.tokenizer())
    other.add_tokens(["<other>"])
    with pytest.raises(LongreinError, match="the agent's tokenizer .* is not the trainer's .*; give both the same"):
        parts.trainer(tmp_path, GOOD, tokenizer=other)
    same = copy.deepcopy(parts.tokenizer())
    assert parts.trainer(tmp_path, GOOD, tokenizer=same).tokenizer is same


def test_a_processor_is_no_tokenizer(tmp_path):
    processor = SimpleNamespace(chat_template="x", pad_token_id=0, tokenizer=parts.tokenizer())
    with pytest.raises(LongreinError, match="the tokenizer is a SimpleNamespace; it must be a tokenizer"):
        parts.trainer(tmp_path, GOOD, tokenizer=processor)


def test_an_agent_that_cannot_act(tmp_path):
    with pytest.raises(LongreinError, match=r"the agent is a dict; it must be a longrein.Agent or have get_action"):
        parts.trainer(tmp_path, GOOD, of={"a": 1}, model=parts.policy())


def test_a_model_by_name_is_refused(tmp_path):
    class Parrot:
        def get_action(self, messages: Any, state: Any) -> tuple[str, Any]:
            return "a", state

    with pytest.raises(LongreinError, match="the model is 'Qwen/Qwen3-0.6B'; it must be a loaded model"):
        parts.trainer(tmp_path, GOOD, of=Parrot(), model="Qwen/Qwen3-0.6B")


def test_a_context_shorter_than_the_limits(tmp_path):
    rows = [GOOD[0], row(Ask, {"max_tokens": 8192}, n=1)]
    with pytest.raises(
        LongreinError, match=r"row 1: Ask allows conversations of 8192 tokens \(`max_tokens`\), the model reads 4096"
    ):
        parts.trainer(tmp_path, rows)


# ---- what an environment returns


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("ragged", "Spoiled.run_trial: padded_rewards is no array of numbers with rows of one length"),
        ("width", r"Spoiled.run_trial: padded_agent_mask has shape \(4, 4\), padded_token_ids \(4, 5\); all must be"),
        ("rows", "Spoiled.run_trial gave 3 rows for 4 rollouts, and row_rollout does not give each rollout its rows"),
        ("finals", r"Spoiled.run_trial gave \(3,\) final_rewards for 4 rollouts; one each is expected"),
        ("nan", "Spoiled.run_trial: rollout 1 has the reward nan; rewards must be numbers"),
        ("token_nan", "Spoiled.run_trial: rollout 1 has a token with the reward nan; rewards must be numbers"),
        ("none", "Spoiled.run_trial: rollout 0 has the reward nan; rewards must be numbers"),
        ("no_agent", "Spoiled.run_trial: rollout 1 has no agent token: padded_agent_mask is 0 all over"),
        ("agent_first", "Spoiled.run_trial: rollout 0 starts with an agent token; a prompt must come first"),
        ("agent_on_padding", "Spoiled.run_trial: rollout 2 has agent tokens where padded_attn_mask is 0"),
        (
            "left_padded",
            "Spoiled.run_trial: rollout 0: padded_attn_mask must be 1 on a row's tokens and 0 on the padding after",
        ),
        ("missing", "Spoiled.run_trial returned no padded_rewards; it returned padded_token_ids"),
        ("not_a_dict", "Spoiled.run_trial returned a list; it must be a dict with padded_token_ids"),
        ("records", "Spoiled.run_trial gave 1 rollouts; 4 were asked for"),
    ],
)
def test_an_environment_that_returns_something_wrong(tmp_path, wrong, message):
    trainer = parts.trainer(tmp_path, [row(Spoiled, {"wrong": wrong}, n=n) for n in (1, 2)])
    with pytest.raises(LongreinError, match=message):
        trainer.train()


# ---- options of TRL


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_arguments_of_trl_without_a_meaning_here(tmp_path, name):
    with pytest.raises(LongreinError) as refused:
        parts.trainer(tmp_path, GOOD, options={name: object()})
    assert str(refused.value) == f"GRPOEnvTrainer takes no `{name}`: {ARGUMENTS[name]}"


def test_an_argument_nobody_knows(tmp_path):
    with pytest.raises(TypeError, match="unexpected argument 'agnet'"):
        parts.trainer(tmp_path, GOOD, options={"agnet": 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_vllm", True),
        ("use_liger_kernel", True),
        ("use_transformers_continuous_batching", True),
        ("generation_kwargs", {"top_k": 3}),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("reward_weights", [1.0]),
        ("max_tool_calling_iterations", 3),
        ("repetition_penalty", 1.2),
        ("multi_objective_aggregation", "normalize_then_sum"),
    ],
)
def test_options_of_trl_without_a_meaning_here(tmp_path, name, value):
    with pytest.raises(LongreinError) as refused:
        parts.trainer(tmp_path, GOOD, **{name: value})
    assert str(refused.value) == f"{name}={value!r} has no meaning with environments: {REFUSED[name][1]}"


def test_every_refused_option_is_one_of_trls(tmp_path):
    assert all(hasattr(parts.config(tmp_path), name) for name in REFUSED)


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        (Sampling(temperature=0.5), {}, "the trainer's temperature is 1.0 and the agent samples at 0.5"),
        (Sampling(), {"temperature": 0.7}, "the trainer's temperature is 0.7 and the agent samples at 1.0"),
        (
            Sampling(temperature=0),
            {"temperature": 0.0},
            "the agent samples at temperature 0: all rollouts of a task would be",
        ),
        (Sampling(), {"top_p": 0.9}, "top_p=0.9 in the configuration, 1.0 on the Agent: set it on the Agent's Sampling"),
        (Sampling(), {"top_k": 5}, "top_k=5 in the configuration, 0 on the Agent"),
        (Sampling(), {"min_p": 0.1}, "min_p=0.1 in the configuration, 0.0 on the Agent"),
        (Sampling(top_k=5), {"old_logps": "recorded"}, "old_logps='recorded' needs untruncated sampling"),
    ],
)
def test_sampling_that_is_not_the_agents(tmp_path, sampling, options, message):
    agent = Agent(parts.policy(), parts.tokenizer(), sampling=sampling)
    with pytest.raises(LongreinError) as refused:
        parts.trainer(tmp_path, GOOD, of=agent, **options)
    assert message in str(refused.value)


def test_the_same_truncation_on_both_is_accepted(tmp_path):
    agent = Agent(parts.policy(), parts.tokenizer(), sampling=Sampling(top_p=0.9, top_k=5, max_tokens=6))
    parts.trainer(tmp_path, GOOD, of=agent, top_p=0.9, top_k=5).train()


def test_a_script_records_no_log_probabilities(tmp_path):
    class Parrot:
        def get_action(self, messages: Any, state: Any) -> tuple[str, Any]:
            return "a", state

    with pytest.raises(LongreinError, match="old_logps='recorded' needs an agent that samples from the policy"):
        parts.trainer(tmp_path, GOOD, of=Parrot(), model=parts.policy(), old_logps="recorded")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": "gae"}, "advantages is 'gae'; it must be one of rewards, group, turn, return, leave_one_out"),
        ({"discount": 1.5}, "discount is 1.5; it must be between 0 and 1"),
        ({"old_logps": "sampler"}, "old_logps is 'sampler'; it must be 'policy' or 'recorded'"),
        ({"resample_flat_groups": -1}, "resample_flat_groups is -1; it must be 0 or more rounds"),
    ],
)
def test_settings_of_our_own(tmp_path, changes, message):
    with pytest.raises(LongreinError) as refused:
        GRPOEnvConfig(str(tmp_path), use_cpu=True, bf16=False, **changes)
    assert str(refused.value) == message


@pytest.mark.parametrize(("fsdp", "zero", "name"), [(True, None, "FSDP"), (False, 3, "ZeRO-3"), (False, 2, None)])
def test_a_model_in_pieces_cannot_sample_in_this_process(fsdp, zero, name):
    """A stand-in for a trainer under FSDP or ZeRO-3, which need GPUs to be real."""
    agent = parts.agent()
    model = object()
    plugin = SimpleNamespace(zero_stage=zero) if zero else None
    trainer = SimpleNamespace(
        args=SimpleNamespace(deepspeed_plugin=plugin), is_fsdp_enabled=fsdp, model=model,
        accelerator=SimpleNamespace(autocast=None),
    )  # fmt: skip
    if name is None:
        check_engine(agent.engine, trainer)
        assert agent.engine.model is model
    else:
        with pytest.raises(
            LongreinError, match=f"under {name} no process holds the whole model.*give the Agent a vLLM engine"
        ):
            check_engine(agent.engine, trainer)


def test_talk_is_an_environment_like_any_other(tmp_path):
    """The refusals above are about their one fault: without it the same trainer trains."""
    trainer = parts.trainer(tmp_path, [row(Talk), row(Ask)])
    trainer.train()
    assert trainer.state.global_step == 1
