"""Datasets of the real reasoning_gym package, answered with what the library itself says is right."""

from __future__ import annotations

import random
import re
import sys

import pytest
import reasoning_gym

from longrein.contract import LongreinError
from longrein.envs.environment import EnvConfigError
from longrein.envs.reasoning_gym import ReasoningGym, drawn, final_answer

SUMS = {"dataset": "chain_sum"}


class Answers:
    """A text agent that says what a function makes of the conversation."""

    def __init__(self, say):
        self.say = say

    def get_action(self, messages, state):
        return self.say(messages), state


def knows(tasks, config, form="<answer>{}</answer>"):
    """An agent that has the library's answers to these tasks."""
    settings = config.get("dataset_kwargs", {})
    entries = [reasoning_gym.create_dataset(config["dataset"], seed=t["seed"], **settings)[t["index"]] for t in tasks]
    answers = {entry["question"].strip(): entry["answer"] for entry in entries}
    return Answers(lambda m: form.format(next(a for q, a in answers.items() if m[0]["content"].startswith(q))))


def play(tokenizer, env_config, tasks, agent, num_rollouts=1):
    env = ReasoningGym(tokenizer=tokenizer("qwen3"), env_config=env_config)
    rollouts = env.run_trial(tasks, agent, num_rollouts)["rollouts"]
    assert [rollout.failed for rollout in rollouts] == [None] * len(rollouts)
    return rollouts


def question(config, task):
    return ReasoningGym.episode_class(task, ReasoningGym.check_config(config)).start()[0]["content"]


@pytest.mark.parametrize(
    "name",
    ["advanced_geometry", "ab", "base_conversion", "caesar_cipher", "countdown", "family_relationships", "knights_knaves",
     "leg_counting", "maze", "mini_sudoku", "n_queens", "number_sorting", "simple_integration", "spell_backward",
     "syllogism", "tower_of_hanoi", "word_sorting", "zebra_puzzles"],
)  # fmt: skip
def test_the_library_s_answer_scores_one_and_nonsense_does_not(name, tokenizer):
    config = {"dataset": name, "max_reply_tokens": 3000, "max_tokens": 16000}
    tasks = ReasoningGym.tasks(2, env_config=config)
    right = play(tokenizer, config, tasks, knows(tasks, config))
    wrong = play(tokenizer, config, tasks, Answers(lambda _: "<answer>?</answer>"))
    assert [(rollout.reward, rollout.success, rollout.turns) for rollout in right] == [(1.0, True, 1)] * 2
    assert all(rollout.reward <= 0.1 and not rollout.success and rollout.turns == 1 for rollout in wrong)
    assert [rollout.info["expected"] for rollout in right] == [rollout.info["answer"] for rollout in right]


def test_every_dataset_of_the_library_can_be_named():
    from reasoning_gym.factory import DATASETS

    for name in DATASETS.keys() - {"composite"}:
        assert ReasoningGym.check_config({"dataset": name}).dataset == name
    mixed = {"datasets": [{"name": name, "weight": 1, "config": {}} for name in ("chain_sum", "spell_backward")]}
    config = {"dataset": "composite", "dataset_kwargs": mixed}
    asked = {question(config, task)[:5] for task in ReasoningGym.tasks(12, env_config=config)}
    assert {"State", "Spell"} <= asked


def test_the_whole_text_is_the_answer_where_there_are_no_tags(tokenizer):
    tasks = ReasoningGym.tasks(1, env_config=SUMS)
    assert play(tokenizer, SUMS, tasks, knows(tasks, SUMS, "{}\n"))[0].reward == 1.0
    assert final_answer("<answer>1</answer> no, <answer>\n2 </answer>") == "2"
    assert final_answer("  17 <answer>\n") == "17 <answer>"


def test_a_task_makes_the_same_entry_whatever_was_asked_before():
    # list_functions draws from the `random` module as well, and would answer otherwise each time
    for name in ("list_functions", "chain_sum", "acre"):
        config = {"dataset": name}
        tasks, before = ReasoningGym.tasks(4, env_config=config), random.getstate()
        there = [question(config, task) for task in tasks]
        drawn.cache_clear()
        assert [question(config, task) for task in reversed(tasks)] == there[::-1]
        assert len(set(there)) == 4
        assert random.getstate() == before


def test_tasks_of_two_seeds_share_no_question():
    asked = [{question(SUMS, task) for task in ReasoningGym.tasks(40, seed=seed, env_config=SUMS)} for seed in (0, 1)]
    assert [len(questions) for questions in asked] == [40, 40]
    assert not asked[0] & asked[1]


def test_more_tasks_than_a_seed_has_entries_go_on_under_another():
    config = {"dataset": "chain_sum", "dataset_kwargs": {"size": 5}}
    tasks = ReasoningGym.tasks(12, env_config=config)
    assert [task["index"] for task in tasks] == [*range(5), *range(5), 0, 1]
    assert len({question(config, task) for task in tasks}) == 12


def test_settings_reach_the_dataset_and_the_instruction_can_go():
    config = {"dataset": "chain_sum", "dataset_kwargs": {"min_terms": 2, "max_terms": 2}, "instruction": ""}
    for task in ReasoningGym.tasks(5, env_config=config):
        assert re.fullmatch(r"State the final answer[^:]*: \d+ [+-] \d+ =", question(config, task))
    assert question(SUMS, {"seed": 1}).endswith("Write the final answer between <answer> and </answer>.")


def test_a_second_try_is_asked_for_where_turns_are_left_and_the_last_answer_counts(tokenizer):
    config = {**SUMS, "max_turns": 3}
    tasks = ReasoningGym.tasks(1, env_config=config)
    right = knows(tasks, SUMS).say
    (late,) = play(tokenizer, config, tasks, Answers(lambda m: right(m) if len(m) == 3 else "0.5"))
    (never,) = play(tokenizer, config, tasks, Answers(lambda _: "0.5"))
    assert (late.reward, late.turns) == (1.0, 2)
    assert "scores 0.00 of 1" in late.calls[list(late.calls)[-1]].messages[-1]["content"]
    assert (never.reward, never.turns, never.limit) == (0.0, 3, None)


def test_rollouts_of_a_task_are_asked_the_same(tokenizer):
    tasks = ReasoningGym.tasks(2, env_config={"dataset": "list_functions"})
    rollouts = play(tokenizer, {"dataset": "list_functions"}, tasks, Answers(lambda _: "?"), num_rollouts=3)
    asked = [next(iter(rollout.calls.values())).messages[0]["content"] for rollout in rollouts]
    assert asked[0] == asked[1] == asked[2] != asked[3] == asked[4] == asked[5]


@pytest.mark.parametrize("name", ["n_queens", "countdown", "simple_integration", "puzzle24", "binary_matrix"])
def test_an_answer_is_never_run_as_code(name, tmp_path):
    ran = tmp_path / "ran"
    episode = ReasoningGym.episode_class({"seed": 1}, ReasoningGym.check_config({"dataset": name}))
    for attack in (f"open({str(ran)!r}, 'w')", f"[open({str(ran)!r}, 'w')]", "9**9**9**9**9", "2**(9**9**9)", "(1).real"):
        assert episode.score(attack) <= 0.05
    assert not ran.exists()


@pytest.mark.parametrize(("name", "answer"), [("prime_factorization", "two"), ("boxnet", "null"), ("coin_flip", "1e999")])
def test_an_answer_that_the_scorer_chokes_on_scores_nothing(name, answer, tokenizer):
    (rollout,) = play(tokenizer, {"dataset": name}, [{"seed": 1}], Answers(lambda _: answer))
    assert rollout.reward == 0.0


def test_rows_name_the_environment_and_carry_its_config(tokenizer):
    config = {"dataset": "chain_sum", "dataset_kwargs": {"max_terms": 3}}
    rows = ReasoningGym.get_train_dataset(4, seed=3, env_config=config)
    assert rows.column_names == ["env_class_path", "env_config", "task_data"]
    assert rows[0]["env_class_path"] == "longrein.envs.reasoning_gym.ReasoningGym"
    assert all(row["env_config"] == config for row in rows)
    tasks = rows["task_data"][:]
    assert tasks == ReasoningGym.tasks(4, seed=3, env_config=config)
    rollouts = play(tokenizer, rows[0]["env_config"], tasks, knows(tasks, config))
    assert [rollout.reward for rollout in rollouts] == [1.0] * 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"dataset": "chainsum"}, "did you mean 'chain_sum'?"),
        ({"dataset": "Word-Ladder"}, "did you mean 'word_ladder'?"),
        ({"dataset": "???"}, "it has ab, acre"),
        ({**SUMS, "dataset_kwargs": {"max_trms": 3}}, "max_trms"),
        ({**SUMS, "dataset_kwargs": {"min_terms": 5, "max_terms": 2}}, "max_terms"),
        ({**SUMS, "dataset_kwargs": {"seed": 5}}, "seeds are in task_data"),
        ({"dataset": "composite"}, "at least one dataset"),
        ({}, "'dataset'"),
    ],
)
def test_what_does_not_fit_is_refused_when_the_environment_is_made(config, words, tokenizer):
    with pytest.raises(EnvConfigError, match=re.escape(words)):
        ReasoningGym(tokenizer=tokenizer("qwen3"), env_config=config)


def test_a_task_outside_the_dataset_is_refused(tokenizer):
    env = ReasoningGym(tokenizer=tokenizer("qwen3"), env_config=SUMS)
    with pytest.raises(LongreinError, match=r"task_data\['seed'\] is None"):
        env.episode({})
    with pytest.raises(LongreinError, match=r"task_data\['index'\] is 500; it must be a whole number from 0 to 499"):
        env.episode({"seed": 1, "index": 500})


def test_without_the_package_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(LongreinError, match=re.escape("pip install 'longrein[envs]'")):
        ReasoningGym.check_config(SUMS)
