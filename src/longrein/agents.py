"""An agent: a policy, the engine that samples from it, and how it samples. What `run_trial` is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrein.contract import Engine, LongreinError, Sampling
from longrein.noise import derive
from longrein.recorder import History, Recorder
from longrein.rendering import Rendering, rendering_for
from longrein.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HUB_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)?")


class Agent:
    """A policy that acts in environments.

    >>> agent = Agent.from_pretrained("Qwen/Qwen3-0.6B", sampling=Sampling(max_tokens=256))     # doctest: +SKIP
    >>> Agent(model, tokenizer)                                                                 # doctest: +SKIP

    Without `engine` the model samples in this process. `renderer` and `template_kwargs` are those of `rendering_for`;
    `rendering` takes its place.
    """

    def __init__(
        self,
        model: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        engine: Engine | None = None,
        sampling: Sampling | None = None,
        renderer: str | None = None,
        rendering: Rendering | None = None,
        history: History = "sampled",
        seed: int = 0,
        **template_kwargs: Any,
    ) -> None:
        if model is None and engine is None:
            raise LongreinError("an Agent needs a model to sample from, or an engine that has one")
        self.policy_model = model
        self.tokenizer = tokenizer
        self.rendering: Rendering = rendering or rendering_for(tokenizer, renderer, **template_kwargs)
        if engine is None:
            from longrein.engines.transformers import TransformersEngine

            assert model is not None
            engine = TransformersEngine(model)
        self.engine = engine
        self.sampling = sampling or Sampling()
        self.history: History = history
        self.seed = seed
        """Changes from trial to trial; a rollout's seed is made of this, its task and its number."""
        self.played: Mapping[int, Rollout] = {}
        """Rollouts of an earlier time, by seed: these are not played again."""
        self.on_finish: Callable[[Rollout], None] | None = None
        """Told of each of this agent's rollouts as it ends, from whichever thread played it."""

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, dtype: Any = None, **kwargs: Any) -> Agent:
        """Load a causal model and its tokenizer from a folder or the hub. Weights are float32 unless `dtype` says."""
        refuse_no_model(name_or_path)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype or torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(name_or_path)
        except (OSError, ValueError) as error:
            cause = str(error).split("\n")[0].split(". ")[0]  # the rest is advice of the hub's client
            raise _unloadable(name_or_path, cause) from error
        return cls(model, tokenizer, **kwargs)

    @property
    def context_length(self) -> int | None:
        """How many tokens the policy can read and write in one conversation."""
        model, lengths = self.policy_model, [getattr(self.engine, "context_length", None)]
        if model is not None:
            lengths.append(getattr(model.config.get_text_config(), "max_position_embeddings", None))
        return min((length for length in lengths if length is not None), default=None)

    def recorder(self) -> Recorder:
        """A fresh recorder over this agent's engine."""
        return Recorder(
            self.engine,
            self.rendering,
            sampling=self.sampling,
            history=self.history,
            context_length=self.context_length,
            on_finish=self._finished,
        )

    def _finished(self, rollout: Rollout) -> None:
        if self.on_finish is not None:
            self.on_finish(rollout)

    def rollout_seed(self, task: Any, occurrence: int, index: int) -> int:
        """The seed of a task's `index`-th rollout; the same in any environment, batch or order."""
        return derive(self.seed, task, occurrence, index)


def refuse_no_model(name_or_path: str) -> None:
    """Refuse a path at which there is nothing; whether there is a model of a name is for the hub to say."""
    if not Path(name_or_path).is_dir() and not _HUB_NAME.fullmatch(str(name_or_path)):
        raise _unloadable(name_or_path, "there is no folder at that path")


def _unloadable(name_or_path: str, cause: str) -> LongreinError:
    return LongreinError(
        f"the model {str(name_or_path)!r} cannot be loaded: it must be a folder that `save_pretrained` wrote, or a causal "
        f"model's name on the hub ({cause})"
    )


def as_agent(agent: Any, tokenizer: Any) -> Agent:
    """An `Agent`, also from an object that only gives text: `get_action(messages, state) -> (text, state)`."""
    if isinstance(agent, Agent):
        return agent
    if callable(getattr(agent, "get_action", None)):
        from longrein.engines.scripted import TextAgentEngine

        return Agent(None, tokenizer, engine=TextAgentEngine(agent, rendering_for(tokenizer)))
    raise LongreinError(
        f"the agent is a {type(agent).__name__}; it must be a longrein.Agent or have get_action(messages, state)"
    )
