"""Games of the real textarena package, played through what they say."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys

import pytest

from longrein import Agent
from longrein.contract import LongreinError
from longrein.engines.scripted import ScriptedEngine
from longrein.envs.environment import EnvConfigError
from longrein.envs.textarena import TextArena, blueprint

GUESS = {"game": "GuessTheNumber-v0"}
HANOI = ["[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]"]


class Says:
    """A text agent that always says what a function makes of the last message."""

    def __init__(self, move):
        self.move = move

    def get_action(self, messages, state):
        return self.move(messages), state


def halve(messages):
    low, high = map(int, re.search(r"between (\d+) and (\d+)", messages[0]["content"]).groups())
    for reply, hint in zip(messages[1::2], messages[2::2], strict=True):
        guess = int(reply["content"].strip("[]"))
        low, high = (guess + 1, high) if "higher" in hint["content"] else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def first_free_cell(seen, rng):
    return f"[{re.findall(r'Available Moves:(.*)', seen)[-1].split('[')[1].split(']')[0]}]"


def play(tokenizer, env_config, agent, tasks=({"seed": 1},), num_rollouts=1):
    trial = TextArena(tokenizer=tokenizer("qwen3"), env_config=env_config).run_trial(list(tasks), agent, num_rollouts)
    assert [rollout.failed for rollout in trial["rollouts"]] == [None] * len(trial["rollouts"])
    return trial["rollouts"]


def conversation(rollout):
    return [(m["role"], m.get("content")) for m in rollout.conversation(list(rollout.calls)[-1])]


def test_a_player_who_reads_the_hints_finds_every_number(tokenizer):
    rollouts = play(tokenizer, GUESS, Says(halve), TextArena.tasks(12, env_config=GUESS))
    assert [rollout.reward for rollout in rollouts] == [1.0] * 12
    assert all(rollout.success and "correct number" in rollout.info["reason"] for rollout in rollouts)
    assert len({rollout.turns for rollout in rollouts}) > 1


def test_moves_outside_the_rules_lose(tokenizer):
    (rollout,) = play(tokenizer, GUESS, Says(lambda _: "[99]"))
    assert (rollout.reward, rollout.success, rollout.info["invalid_move"]) == (0.0, False, True)


def test_a_script_solves_the_towers_and_leaving_out_a_move_does_not(tokenizer, rendering):
    def agent(moves):
        return Agent(None, tokenizer("qwen3"), engine=ScriptedEngine(moves, rendering("qwen3")))

    (solved,) = play(tokenizer, {"game": "TowerOfHanoi-v0"}, agent(HANOI))
    (unsolved,) = play(tokenizer, {"game": "TowerOfHanoi-v0", "max_turns": 6}, agent(HANOI))
    assert (solved.reward, solved.turns, solved.limit) == (1.0, 7, None)
    assert (unsolved.reward, unsolved.turns, unsolved.limit) == (0.0, 6, "turns")


def test_the_game_s_own_settings_can_be_given(tokenizer):
    (rollout,) = play(tokenizer, {**GUESS, "game_kwargs": {"max_number": 500}}, Says(halve))
    assert "between 1 and 500" in conversation(rollout)[0][1]
    assert rollout.reward == 1.0


def test_a_message_holds_only_what_is_new(tokenizer):
    (rollout,) = play(tokenizer, {"game": "TowerOfHanoi-v0"}, Says(lambda m: HANOI[len(m) // 2]))
    said = [text for role, text in conversation(rollout) if role == "user"]
    assert "You are playing Tower of Hanoi" in said[0]
    assert all("You are playing" not in text and text.count("Current Board") == 1 for text in said[1:])
    assert not any(f"[{move}" in text for move, text in zip(HANOI, said[1:], strict=False))


def test_moves_without_brackets_count_unless_the_raw_game_is_asked_for(tokenizer):
    (lenient,) = play(tokenizer, GUESS, Says(lambda m: halve(m).strip("[]")))
    (strict,) = play(tokenizer, {"game": "GuessTheNumber-v0-raw"}, Says(lambda m: halve(m).strip("[]")))
    assert (lenient.reward, strict.reward) == (1.0, 0.0)


def test_a_seed_gives_one_game_whatever_else_is_played(tokenizer):
    blackjack, stand_or_hit = {"game": "Blackjack-v0"}, Says(lambda m: "[Hit]" if len(m) % 4 == 1 else "[Stand]")
    (alone,) = play(tokenizer, blackjack, stand_or_hit, [{"seed": 5}])
    before = random.getstate()
    among = play(tokenizer, blackjack, stand_or_hit, [{"seed": seed} for seed in (3, 4, 5, 6)], num_rollouts=2)
    assert random.getstate() == before
    assert conversation(among[4]) == conversation(among[5]) == conversation(alone)
    assert len({str(conversation(rollout)) for rollout in among}) == 4


@pytest.mark.parametrize(
    "game",
    ["2048-v0", "Bandit-v0", "Crosswords-v0", "FifteenPuzzle-v0", "FrozenLake-v0-random", "LightsOut-v0", "LogicPuzzle-v0",
     "Mastermind-v0-hard", "Minesweeper-v0-small", "PegJump-v0", "RushHour-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0",
     "Sokoban-v0", "Sudoku-v0-easy", "ThreeCardMonte-v0-train"],
)  # fmt: skip
def test_games_for_one_need_nothing_but_the_package(game, tokenizer, capfd):
    first, second = play(tokenizer, {"game": game}, Says(lambda _: "[nonsense]"), num_rollouts=2)
    assert conversation(first) == conversation(second)
    assert len(conversation(first)[0][1]) > 50
    assert first.reward <= 0.3
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0"])
def test_games_that_swap_reward_and_reason_still_give_a_number(game, tokenizer):
    (rollout,) = play(tokenizer, {"game": game}, Says(lambda _: "nonsense"))
    assert 0 <= rollout.reward < 1
    assert rollout.info["reason"].startswith(("Bad action", "Invalid action"))


def test_a_scripted_opponent_takes_the_other_seat(tokenizer):
    config = {"game": "TicTacToe-v0", "opponent": f"{__name__}.first_free_cell"}
    for player in (0, 1):
        diagonal = Says(lambda m: ["[4]", "[2]", "[6]"][len(m) // 2])
        (won,) = play(tokenizer, config, diagonal, [{"seed": 0, "player": player}])
        assert (won.reward, won.turns) == (1.0, 3)
        assert f"[Player {1 - player}]" in str(conversation(won))
    (lost,) = play(tokenizer, config, Says(lambda _: "[9]"))
    assert lost.reward == -1.0
    assert {task["player"] for task in TextArena.tasks(20, env_config=config)} == {0, 1}


def test_rows_name_the_environment_and_carry_its_config(tokenizer):
    config = {**GUESS, "game_kwargs": {"max_number": 8}}
    rows = TextArena.get_train_dataset(4, seed=3, env_config=config)
    assert rows.column_names == ["env_class_path", "env_config", "task_data"]
    assert rows[0]["env_class_path"] == "longrein.envs.textarena.TextArena"
    assert all(row["env_config"] == config for row in rows)
    assert len({row["task_data"]["seed"] for row in rows}) == 4
    assert rows["task_data"][:] == TextArena.tasks(4, seed=3, env_config=config) != TextArena.tasks(4, env_config=config)
    assert play(tokenizer, rows[0]["env_config"], Says(halve), [rows[0]["task_data"]])[0].reward == 1.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"game": "GuesTheNumber"}, "did you mean 'GuessTheNumber-v0'"),
        ({"game": "wordle-v0"}, "did you mean 'Wordle-v0'"),
        ({"game": "TicTacToe-v0"}, "'TicTacToe-v0' is for 2 players; name who plays the others in `opponent`"),
        ({"game": "SecretMafia-v0"}, "for 6 players"),
        ({"game": "TwentyQuestions-v0"}, "refereed by a remote model"),
        ({**GUESS, "game_kwargs": {"max_numbr": 3}}, "max_numbr"),
        ({"game": "TicTacToe-v0", "opponent": "no.such.player"}, "opponent is 'no.such.player'"),
        ({"game": "TicTacToe-v0", "opponent": "os.path"}, "which is a module, not a function"),
        ({}, "'game'"),
    ],
)
def test_what_cannot_be_played_is_refused_when_the_environment_is_made(config, words, tokenizer):
    with pytest.raises(EnvConfigError, match=re.escape(words)):
        TextArena(tokenizer=tokenizer("qwen3"), env_config=config)


def test_a_task_without_a_seed_is_refused(tokenizer):
    env = TextArena(tokenizer=tokenizer("qwen3"), env_config=GUESS)
    with pytest.raises(LongreinError, match=r"task_data\['seed'\] is None"):
        env.episode({})
    with pytest.raises(LongreinError, match="players 0 to 0"):
        env.episode({"seed": 1, "player": 1})


@pytest.fixture
def no_words(monkeypatch):
    """A machine without nltk's data, whatever this one has; gives the list of folders that are searched for it."""
    import nltk

    blueprint.cache_clear()
    monkeypatch.setattr(nltk.data, "path", [])
    yield nltk.data.path
    nltk.corpus.words._unload()
    blueprint.cache_clear()


@pytest.mark.parametrize("game", ["Hangman-v0", "Wordle-v0", "WordLadder-v0", "WordSearch-v0"])
def test_word_games_without_words_say_how_to_get_them(game, no_words):
    with pytest.raises(EnvConfigError, match=r"reads the nltk data '\w+'.*python -m nltk.downloader words"):
        TextArena.check_config({"game": game})


def test_word_games_play_from_the_words_on_this_machine(no_words, tmp_path, tokenizer):
    corpus, tagger = tmp_path / "corpora/words", tmp_path / "taggers/averaged_perceptron_tagger_eng"
    corpus.mkdir(parents=True)
    tagger.mkdir(parents=True)
    (corpus / "en-basic").write_text("apple\nhorse\n")
    (corpus / "en").write_text("apple\nhorse\nhouse\nother\n")
    for name, value in {"weights": {}, "tagdict": {"apple": "NN", "horse": "NN"}, "classes": ["NN"]}.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(value))
    no_words.append(str(tmp_path))

    tasks = [{"seed": seed} for seed in range(8)]
    for game in ("Hangman-v0", "Wordle-v0"):
        apples = play(tokenizer, {"game": game, "max_turns": 1}, Says(lambda _: "[apple]"), tasks)
        horses = play(tokenizer, {"game": game, "max_turns": 1}, Says(lambda _: "[horse]"), tasks)
        assert [a.reward + h.reward for a, h in zip(apples, horses, strict=True)] == [1.0] * 8
        assert len({a.reward for a in apples}) == 2


def test_without_the_package_the_way_to_get_it_is_named(monkeypatch):
    blueprint.cache_clear()
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(LongreinError, match=re.escape("pip install 'longrein[envs]'")):
        TextArena.check_config(GUESS)


def test_importing_the_environments_imports_no_game_library():
    modules = "longrein.envs, longrein.envs.textarena, longrein.envs.reasoning_gym, longrein.envs.calculator"
    check = f"import sys, {modules}; assert not {{'textarena', 'reasoning_gym', 'nltk', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
