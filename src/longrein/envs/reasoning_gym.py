"""Any of the procedural datasets of the `reasoning_gym` package as an environment, with the library's own score as reward.

Always true of a task: `{"seed", "index"}` and the settings make the entry again, whatever was asked before it (five datasets
walk through sets, so for those only under one PYTHONHASHSEED: isomorphic_strings, knight_swap, polynomial_multiplication,
ransom_note and word_ladder). No text of the policy is run as code: a few of the library's scorers evaluate the answer, and
those are given nothing but numbers, lists or formulas.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import logging
import random
import re
from dataclasses import dataclass, field
from typing import Any

from longrein.contract import LongreinError, Message
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment, Episode, Step
from longrein.noise import random_module_as

logger = logging.getLogger(__name__)

LISTS = r"[\w\s,.|'\"\[\]-]*+"
ARITHMETIC = r"(?:[\d\s().+/-]|\*(?!\*))*+"
_NAME = r"(?<![A-Za-z])(?:exp|log|sqrt|Abs|pi|a?(?:sin|cos|tan)h?|[A-Za-z])(?![A-Za-z])"
_POWER = r"\*\*\s*(?:-?\d{1,2}|\(\s*-?\d{1,2}\s*(?:/\s*\d{1,2}\s*)?\))(?!\s*(?:\d|\.|\*\*))"
FORMULAS = rf"(?:{_NAME}|{_POWER}|\*(?!\*)|[\d\s().+/-])*+"
"""Small powers only, as a tower of them computes for ever; no `Integral`, as the question written again would score."""
EVALUATED = {
    "binary_matrix": LISTS,
    "n_queens": LISTS,
    "spiral_matrix": LISTS,
    "string_insertion": LISTS,
    "countdown": ARITHMETIC,
    "puzzle24": ARITHMETIC,
    "intermediate_integration": FORMULAS,
    "polynomial_multiplication": FORMULAS,
    "simple_integration": FORMULAS,
}
"""The datasets whose scorers call `eval` on the answer, and the only answers they are given."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig(EnvConfig):
    max_turns: int = 1
    """Answers the policy may give; above 1 it is told the score of a wrong one and asked again. The last one counts."""
    max_reply_tokens: int = 2048
    dataset: str
    """A name in reasoning_gym's registry, like `chain_sum`."""
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of the dataset, like `{"max_terms": 3}`."""
    instruction: str = "Write the final answer between <answer> and </answer>."
    """Follows the question; empty for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "seed" in self.dataset_kwargs:
            raise EnvConfigError("dataset_kwargs has a 'seed'; seeds are in task_data, so leave it out")
        self.procedural(seed=0)

    @property
    def size(self) -> int:
        """Entries under one seed."""
        return self.dataset_kwargs.get("size", 500)

    def procedural(self, seed: int) -> Any:
        return procedural(self.dataset, seed, self.dataset_kwargs)


class QuestionEpisode(Episode):
    def __init__(self, task_data: dict[str, Any], config: ReasoningGymConfig) -> None:
        super().__init__(task_data, config)
        seed, index = task_data.get("seed"), task_data.get("index", 0)
        if not isinstance(seed, int):
            raise LongreinError(f"task_data['seed'] is {seed!r}; an entry needs a whole number to be drawn from")
        if index not in range(config.size):
            raise LongreinError(f"task_data['index'] is {index!r}; it must be a whole number from 0 to {config.size - 1}")
        self._dataset, entry = drawn(config.dataset, seed, index, json.dumps(config.dataset_kwargs, sort_keys=True))
        self.entry = copy.deepcopy(entry)
        self._answers, self._score = 0, 0.0

    def start(self) -> list[Message]:
        return [{"role": "user", "content": f"{self.entry['question']}\n\n{self.config.instruction}".strip()}]

    def step(self, reply: Message) -> Step:
        answer = final_answer(reply.get("content") or "")
        before, self._score = self._score, self.score(answer)
        self._answers += 1
        done = self._score >= 1 or self._answers >= self.config.max_turns
        again = {"role": "user", "content": f"That answer scores {self._score:.2f} of 1. Try again."}
        return Step(
            messages=() if done else [again],
            reward=self._score - before,
            done=done,
            info={"answer": answer, "expected": self.entry["answer"]},
        )

    def score(self, answer: str) -> float:
        allowed = EVALUATED.get(self.entry["metadata"].get("source_dataset", self.config.dataset))
        if allowed is not None and not re.fullmatch(allowed, answer):
            answer = ""
        try:
            return float(self._dataset.score_answer(answer, self.entry))
        except Exception as error:  # what some scorers do with an answer that is not of the form they expect
            logger.debug("%s cannot score %r: %s: %s", self.config.dataset, answer, type(error).__name__, error)
            return 0.0


class ReasoningGym(Environment):
    """Questions with a checked answer, one reply each.

    >>> config = {"dataset": "chain_sum", "dataset_kwargs": {"max_terms": 3}}
    >>> rows = ReasoningGym.get_train_dataset(64, env_config=config)                            # doctest: +SKIP
    >>> env = ReasoningGym(tokenizer=tokenizer, env_config=config)                              # doctest: +SKIP
    >>> trial = env.run_trial([rows[0]["task_data"]], agent, num_rollouts=8)                    # doctest: +SKIP
    """

    Config = ReasoningGymConfig
    episode_class = QuestionEpisode

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Most datasets draw entry `index` from `seed + index`, so that neighbouring seeds share nearly all their entries;
        the seeds of tasks are therefore drawn far apart."""
        config = cls.check_config(env_config or {})
        assert isinstance(config, ReasoningGymConfig)
        rng = random.Random(f"reasoning-gym-{seed}")
        seeds = [rng.randrange(2**31) for _ in range(0, count, config.size)]
        return [{"seed": seeds[i // config.size], "index": i % config.size} for i in range(count)]


def final_answer(text: str) -> str:
    """What stands in the last <answer> tags, or the whole text where there are none."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (tagged[-1] if tagged else text).strip()


def procedural(name: str, seed: int, kwargs: dict[str, Any]) -> Any:
    """The dataset of a name, refused in words when there is none or the settings do not fit."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise LongreinError(f"reasoning_gym is not installed ({error}): run `pip install 'longrein[envs]'`") from error
    if name not in DATASETS:
        near = difflib.get_close_matches(str(name).lower().replace("-", "_"), DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(DATASETS))}"
        raise EnvConfigError(f"dataset is {name!r}, which reasoning_gym does not have; {hint}")
    try:
        if name == "composite":
            kwargs = {**kwargs, "datasets": [DatasetSpec(**spec) for spec in kwargs.get("datasets", ())]}
        return reasoning_gym.create_dataset(name, seed=seed, **kwargs)
    except (AssertionError, TypeError, ValueError) as error:
        raise EnvConfigError(f"reasoning_gym cannot make {name!r} with dataset_kwargs {kwargs!r}: {error}") from error


@functools.lru_cache(maxsize=64)
def drawn(name: str, seed: int, index: int, kwargs: str) -> tuple[Any, dict[str, Any]]:
    """A dataset fresh for this one entry, and the entry: some draw from a stream that goes on with every entry asked for."""
    with random_module_as(random.Random(f"{seed}-{index}")):
        dataset = procedural(name, seed, json.loads(kwargs))
        return dataset, dataset[index]
