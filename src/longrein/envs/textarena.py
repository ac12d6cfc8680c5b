"""Any game of the `textarena` package as an environment: the game speaks in user messages and gives its own reward.

Always true of an episode: its game is its own object and draws from its own random stream, so what a seed gives does not
depend on what else is played; a message holds only what the game said since the one before; nothing is downloaded.
Left out: textarena's observation wrappers, which say the whole history again at every turn (`Wordle-v0`, `Wordle-v0-train`
and `Wordle-v0-raw` differ here only in whether a move without brackets is put into them).
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import json
import logging
import platform
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from longrein.contract import LongreinError, Message
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment, Episode, Step
from longrein.noise import random_module_as

logger = logging.getLogger(__name__)

Opponent = Callable[[str, random.Random], str]
"""Everything its player has read so far, and a random stream of its own, to a move."""


@dataclass(frozen=True, kw_only=True)
class TextArenaConfig(EnvConfig):
    max_turns: int = 50
    """A game that is not over by then has earned nothing."""
    game: str
    """A name in textarena's registry, like `Wordle-v0` or `TicTacToe-v0`."""
    game_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of the game's constructor, like `{"max_number": 50}`."""
    opponent: str | None = None
    """Who plays the other seats of a game for several: the dotted path of an `Opponent`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        players = self.blueprint().players
        if self.opponent is not None:
            self.opponent_function()
        elif players > 1:
            raise EnvConfigError(
                f"game {self.game!r} is for {players} players; name who plays the others in `opponent` (the dotted path of "
                "a function (seen, rng) -> move) or choose a game for one"
            )

    def blueprint(self) -> Blueprint:
        return blueprint(self.game, json.dumps(self.game_kwargs, sort_keys=True))

    def opponent_function(self) -> Opponent:
        module, _, name = (self.opponent or "").rpartition(".")
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise EnvConfigError(f"opponent is {self.opponent!r}, which is no dotted path of a function: {error}") from error
        if not callable(function):
            raise EnvConfigError(f"opponent is {self.opponent!r}, which is a {type(function).__name__}, not a function")
        return cast(Opponent, function)


class GameEpisode(Episode):
    def __init__(self, task_data: dict[str, Any], config: TextArenaConfig) -> None:
        super().__init__(task_data, config)
        self.seed, self.player = task_data.get("seed"), task_data.get("player", 0)
        players = config.blueprint().players
        if not isinstance(self.seed, int):
            raise LongreinError(f"task_data['seed'] is {self.seed!r}; a game needs a whole number to be dealt from")
        if self.player not in range(players):
            raise LongreinError(f"task_data['player'] is {self.player!r}; {config.game} has the players 0 to {players - 1}")
        self._random = random.Random(self.seed)
        self._opponent = config.opponent_function() if config.opponent else None
        self._opponent_random = random.Random(f"opponent-{self.seed}")
        self._seen = [""] * players

    def start(self) -> Sequence[Message]:
        design = self.config.blueprint()
        with random_module_as(self._random):
            self.game = design.new_game()
            self.game.reset(num_players=design.players, seed=self.seed)
            over = self._others_move(False)
        if over:
            raise LongreinError(f"{self.config.game} with seed {self.seed} was over before player {self.player} had a turn")
        return [{"role": "user", "content": self._news()}]

    def step(self, reply: Message) -> Step:
        with random_module_as(self._random):
            over, _ = self.game.step(reply.get("content") or "")
            over = self._others_move(over)
        if not over:
            return Step(messages=[{"role": "user", "content": self._news() or "The game says nothing. Go on."}])
        rewards, infos = self.game.close()
        reward, info = (rewards or {}).get(self.player, 0), dict(infos[self.player])
        if isinstance(reward, str):  # Countdown, Cryptarithm and Slitherlink swap an invalid move's reward and reason
            reward, info["reason"] = info["reason"].removeprefix("Invalid Move: "), reward
        return Step(reward=float(reward), done=True, info=info)

    def _others_move(self, over: bool) -> bool:
        """Play on until it is the policy's turn; whether the game is over."""
        while not over and (player := self.game.state.current_player_id) != self.player:
            assert self._opponent is not None
            self._seen[player] += self._news() + "\n"
            over, _ = self.game.step(self._opponent(self._seen[player], self._opponent_random))
        return over

    def _news(self) -> str:
        """What the player to move has not read yet, without its own moves."""
        player, news = unwrapped(self.game).get_observation()
        single, roles = len(self._seen) == 1, self.game.state.role_mapping
        lines = []
        for sender, text, kind in news:
            if not isinstance(text, str):  # the same three games swap these too; it is the player's own move
                continue
            if kind.name == "PLAYER_ACTION" and (single or sender == player):
                continue
            lines.append(text if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}")
        return "\n".join(lines).strip()


class TextArena(Environment):
    """A textarena game, played by the policy's text.

    >>> rows = TextArena.get_train_dataset(8, env_config={"game": "GuessTheNumber-v0"})         # doctest: +SKIP
    >>> env = TextArena(tokenizer=tokenizer, env_config={"game": "GuessTheNumber-v0"})          # doctest: +SKIP
    >>> trial = env.run_trial([{"seed": 7}], agent, num_rollouts=4)                             # doctest: +SKIP

    A task is `{"seed": int}`; in games for several, `"player"` is the policy's seat (0 unless said).
    """

    Config = TextArenaConfig
    episode_class = GameEpisode

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        config = cls.check_config(env_config or {})
        assert isinstance(config, TextArenaConfig)
        rng, players = random.Random(f"textarena-{seed}"), config.blueprint().players
        seeds = rng.sample(range(2**31), count)
        return [{"seed": s} if players == 1 else {"seed": s, "player": rng.randrange(players)} for s in seeds]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A game as it was made, and never played."""

    game: Any
    players: int
    """The fewest it can be played with."""

    def new_game(self) -> Any:
        # Word lists are large and only read: they are shared, all else is copied.
        return copy.deepcopy(self.game, {id(v): v for v in vars(unwrapped(self.game)).values() if _is_word_list(v)})


@functools.lru_cache(maxsize=64)
def blueprint(name: str, kwargs: str) -> Blueprint:
    """The game of a name, refused in words when it cannot be played on this machine."""
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise LongreinError(f"textarena is not installed ({error}): run `pip install 'longrein[envs]'`") from error
    if name not in ENV_REGISTRY:
        names = {known.lower(): known for known in ENV_REGISTRY}
        near = difflib.get_close_matches(str(name).lower(), names, n=1)
        hint = (
            f"; did you mean {names[near[0]]!r}?" if near else "; `textarena.pprint_registry_detailed()` lists what it has"
        )
        raise EnvConfigError(f"game is {name!r}, which textarena does not have{hint}")
    with random_module_as(random.Random(0)), _no_downloads():
        try:
            _quiet(ENV_REGISTRY[name].entry_point)
            game = textarena.make(name, **json.loads(kwargs))
            if any(type(value).__name__.startswith("OpenRouter") for value in vars(unwrapped(game)).values()):
                raise ValueError("OpenRouter")
            return Blueprint(game, _fewest_players(game))
        except Exception as error:
            raise EnvConfigError(_why_not(name, error)) from error


def unwrapped(game: Any) -> Any:
    """The game itself, under textarena's wrappers."""
    while "env" in vars(game):
        game = game.env
    return game


def _fewest_players(game: Any) -> int:
    from textarena import SinglePlayerState

    failure: Exception | None = None
    for players in range(1, 16):
        trial = copy.deepcopy(unwrapped(game))
        try:
            trial.reset(num_players=players, seed=0)
        except Exception as error:  # games say no to a number of players in many classes
            failure = failure or error
            continue
        if players > 1 or isinstance(trial.state, SinglePlayerState):
            return players
    raise failure or LongreinError("it takes no number of players from 1 to 15")


def _why_not(name: str, error: Exception) -> str:
    if missing := re.search(r"nltk\.download\('(\w+)'\)", str(error)):
        return (
            f"game {name!r} reads the nltk data {missing[1]!r}, which is not on this machine; get it once with `python -m "
            "nltk.downloader words averaged_perceptron_tagger_eng`, or point NLTK_DATA at a folder that has it"
        )
    if "OpenRouter" in str(error):
        return f"game {name!r} is refereed by a remote model (OpenRouter), and games are played offline; choose another"
    cause = f"{type(error).__name__}: {str(error).strip()}"
    return f"textarena cannot make game {name!r} on Python {platform.python_version()}: {cause}"


def _is_word_list(value: Any) -> bool:
    if isinstance(value, list | set):
        return len(value) > 500 and all(isinstance(word, str) for word in value)
    return type(value).__name__ == "EnglishDictionary"


def _quiet(entry_point: str) -> None:
    """Send what a game's module prints to the log."""
    module = importlib.import_module(entry_point.partition(":")[0])
    vars(module)["print"] = lambda *parts, **_: logger.debug(" ".join(map(str, parts)))


@contextmanager
def _no_downloads() -> Iterator[None]:
    """The word games try to download their words whenever they are made, also where they have them."""
    nltk = vars(importlib.import_module("nltk"))
    download, nltk["download"] = nltk["download"], lambda *_, **__: False
    try:
        yield
    finally:
        nltk["download"] = download
