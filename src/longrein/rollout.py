"""The record of one episode: a tree of model calls, kept as the exact tokens the model read and wrote.

Always true of what this file makes:
- the tokens along a path from a root are, to the id, what the engine was given and what it drew;
- a sampled token is trainable in exactly one row, or carries a reason why it is not;
- a row's token rewards add up to its rollout's reward over the rollout's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from longrein.contract import LongreinError, Message, Tool

Ids = NDArray[np.int32]
Credit = Literal["spread", "last", "terminal"]
Reason = Literal["undelivered", "truncated", "stale", "auxiliary", "rewritten", "failed"]

CREDITS: tuple[Credit, ...] = ("spread", "last", "terminal")


@dataclass(frozen=True, slots=True)
class Call:
    """One model call, immutable once recorded; `Rollout.update` puts a changed copy in its place."""

    id: str
    parent: str | None
    """The call whose tokens this prompt extends; None for a new root."""
    context_ids: Ids
    """What this call's prompt adds to its parent's tokens."""
    completion_ids: Ids
    logprobs: NDArray[np.float32]
    """Of `completion_ids` under the policy at the sampling temperature: what a trainer computes."""
    finish_reason: str
    """`stop`, `length`, `tool_calls` or `aborted`."""
    sampler_logprobs: NDArray[np.float32] | None = None
    """Under the truncated distribution, only when top-p, top-k or min-p were on."""
    policy_version: int = 0
    """Of the oldest of `completion_ids`."""
    versions: NDArray[np.int32] | None = None
    """Of each of `completion_ids`, only when the weights changed while they were drawn."""
    messages: tuple[Message, ...] = ()
    """The messages this call adds to its parent's conversation, for people."""
    tools: tuple[Tool, ...] = ()
    reply: Message = field(default_factory=dict)
    delivered: bool = True
    """Whether the reply reached whoever asked for it."""
    reward: float | None = None
    """Reward of this turn, when the environment gives one."""
    excluded: Reason | None = None
    """Why the sampled tokens are not trained, when they are not."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Root to leaf as one row of tokens; index t of every array speaks of token t."""

    token_ids: Ids
    sampled: NDArray[np.bool_]
    """Drawn by the policy, here or in a branch that shares this prefix."""
    agent_mask: NDArray[np.bool_]
    """Trained in this branch. Across the branches of a rollout each sampled token is trained at most once."""
    logprobs: NDArray[np.float32]
    """Recorded log-probabilities of the sampled tokens, 0 elsewhere."""
    rewards: NDArray[np.float32]
    calls: tuple[str, ...]
    """The calls along the path, root first."""


@dataclass(slots=True, eq=False)
class Rollout:
    """One episode of one task.

    >>> import numpy as np
    >>> rollout = Rollout(id="r0")
    >>> one, zero = np.array([5], np.int32), np.array([-0.1], np.float32)
    >>> _ = rollout.add(Call("c0", None, np.array([1, 2], np.int32), one, zero, "stop"))
    >>> rollout.tokens("c0").tolist()
    [1, 2, 5]
    """

    id: str
    task: Any = None
    seed: int = 0
    env: str = ""
    calls: dict[str, Call] = field(default_factory=dict)
    reward: float | None = None
    """The episode's whole reward; None while it runs, and for ever if it failed."""
    success: bool | None = None
    failed: str | None = None
    """The cause, when our side broke (engine, sandbox, verifier)."""
    limit: str | None = None
    """The limit the episode ran into (`turns`, `tokens`, `time`); it is scored like any other."""
    info: dict[str, Any] = field(default_factory=dict)
    group: str = ""
    """The rollouts of one task in one trial share it."""
    _children: dict[str | None, list[str]] = field(default_factory=dict, init=False, repr=False)
    _prompt_lengths: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for call in self.calls.values():
            self._place(call)

    def add(self, call: Call) -> Call:
        """Record a call. Its parent must already be here, and every sampled token needs a log-probability."""
        if call.parent is not None and call.parent not in self.calls:
            raise LongreinError(f"call {call.id} names parent {call.parent}, which is not in rollout {self.id}")
        if call.id in self.calls:
            raise LongreinError(f"call {call.id} is already in rollout {self.id}; calls are recorded once")
        of_tokens = {"log-probabilities": (call.logprobs, call.sampler_logprobs), "policy versions": (call.versions,)}
        for what, arrays in of_tokens.items():
            for values in arrays:
                if values is not None and len(values) != len(call.completion_ids):
                    raise LongreinError(
                        f"call {call.id} has {len(call.completion_ids)} sampled tokens and {len(values)} {what}"
                    )
        self.calls[call.id] = call
        self._place(call)
        return call

    def _place(self, call: Call) -> None:
        self._children.setdefault(call.parent, []).append(call.id)
        before = (
            0 if call.parent is None else self._prompt_lengths[call.parent] + len(self.calls[call.parent].completion_ids)
        )
        self._prompt_lengths[call.id] = before + len(call.context_ids)

    def update(self, call_id: str, **changes: Any) -> Call:
        """Put a changed copy of a call in its place (delivery, reward, exclusion; never tokens)."""
        if forbidden := changes.keys() - {"delivered", "reward", "excluded"}:
            raise LongreinError(f"a recorded call's {', '.join(sorted(forbidden))} cannot change")
        if call_id not in self.calls:
            raise LongreinError(f"call {call_id} is not in rollout {self.id}")
        self.calls[call_id] = replace(self.calls[call_id], **changes)
        return self.calls[call_id]

    def children(self, call_id: str | None) -> list[str]:
        """The calls that extend this one, in the order they came; `None` gives the roots."""
        return self._children.get(call_id, [])

    def path(self, call_id: str) -> list[Call]:
        """The calls from the root to this one."""
        path: list[Call] = []
        at: str | None = call_id
        while at is not None:
            path.append(self.calls[at])
            at = path[-1].parent
        return path[::-1]

    def tokens(self, call_id: str) -> Ids:
        """Everything the model had read and written when this call ended."""
        return np.concatenate([part for call in self.path(call_id) for part in (call.context_ids, call.completion_ids)])

    def prompt(self, call_id: str) -> Ids:
        """What the engine was given for this call."""
        tokens = self.tokens(call_id)
        return tokens[: len(tokens) - len(self.calls[call_id].completion_ids)]

    def prompt_length(self, call_id: str) -> int:
        """How many tokens the engine was given for this call; told without walking to the root."""
        return self._prompt_lengths[call_id]

    def conversation(self, call_id: str) -> list[Message]:
        """The messages along the path, the reply of this call last."""
        return [message for call in self.path(call_id) for message in (*call.messages, call.reply)]

    def reason(self, call: Call) -> Reason | None:
        """Why this call's sampled tokens are not trained; None when they are."""
        if self.failed is not None:
            return "failed"
        return call.excluded if call.excluded or call.delivered else "undelivered"

    @property
    def turns(self) -> int:
        return len(self.calls)

    @property
    def agent_tokens(self) -> int:
        """Sampled tokens that are trained."""
        return sum(len(call.completion_ids) for call in self._trained())

    @property
    def truncated(self) -> bool:
        """Whether the episode ended because tokens ran out."""
        last = next(reversed(self.calls.values()), None)
        return self.limit == "tokens" or (last is not None and last.finish_reason == "length")

    def branches(self) -> list[Branch]:
        """Every root-to-leaf path, in the order of their leaves."""
        return self._rows([call_id for call_id in self.calls if not self._children.get(call_id)], "spread")

    def rows(self, credit: Credit = "spread") -> list[Branch]:
        """The paths a trainer needs: those that end in a trained call, and one path if nothing is trained."""
        trained = {call.id for call in self._trained()}
        needed: set[str] = set()  # calls above a trained one
        for call_id in trained:
            at = self.calls[call_id].parent
            while at is not None and at not in needed:
                needed.add(at)
                at = self.calls[at].parent
        tips = [call_id for call_id in self.calls if call_id in trained and call_id not in needed]
        if not tips:
            tips = [call_id for call_id in self.calls if not self._children.get(call_id)][:1]
        return self._rows(tips, credit)

    def drop_stale(self, oldest: int) -> list[bool]:
        """Leave out the rows that train a token of a policy before `oldest`; says of each of `rows()` whether it was one."""
        seen: set[str] = set()
        trained_in = []
        for row in self.rows():
            own = [self.calls[call_id] for call_id in row.calls if call_id not in seen]
            trained_in.append([call for call in own if self.reason(call) is None])
            seen.update(row.calls)
        stale = [any(call.policy_version < oldest for call in calls) for calls in trained_in]
        for calls, is_stale in zip(trained_in, stale, strict=True):
            for call in calls if is_stale else ():
                self.update(call.id, excluded="stale")
        return stale

    def _trained(self) -> list[Call]:
        return [call for call in self.calls.values() if len(call.completion_ids) and self.reason(call) is None]

    def _rows(self, tips: Sequence[str], credit: Credit) -> list[Branch]:
        rewards = self._token_rewards(credit)
        owned: set[str] = set()
        rows = []
        for tip in tips:
            path = self.path(tip)
            ids, sampled, agent, logprobs, credits = [], [], [], [], []
            for call in path:
                context, drawn = len(call.context_ids), len(call.completion_ids)
                trained = call.id not in owned and self.reason(call) is None
                owned.add(call.id)
                ids += [call.context_ids, call.completion_ids]
                sampled += [np.zeros(context, bool), np.ones(drawn, bool)]
                agent += [np.zeros(context, bool), np.full(drawn, trained)]
                logprobs += [np.zeros(context, np.float32), call.logprobs]
                credits += [
                    np.zeros(context, np.float32),
                    rewards[call.id] if trained else np.zeros(drawn, np.float32),
                ]
            rows.append(
                Branch(
                    token_ids=np.concatenate(ids),
                    sampled=np.concatenate(sampled),
                    agent_mask=np.concatenate(agent),
                    logprobs=np.concatenate(logprobs),
                    rewards=np.concatenate(credits),
                    calls=tuple(call.id for call in path),
                )
            )
        return rows

    def _token_rewards(self, credit: Credit) -> dict[str, NDArray[np.float32]]:
        """Each call's share of the reward, token by token. What no trained turn earned goes to the last one."""
        rewards = {call.id: np.zeros(len(call.completion_ids), np.float32) for call in self.calls.values()}
        if credit not in CREDITS:
            raise LongreinError(f"credit is {credit!r}; it must be one of {', '.join(CREDITS)}")
        trained = self._trained()
        if self.reward is None or not trained:
            return rewards
        earned = {call.id: call.reward or 0.0 for call in trained}
        if credit == "terminal":
            earned = dict.fromkeys(earned, 0.0)
        earned[trained[-1].id] += self.reward - math.fsum(earned.values())
        for call in trained:
            if credit == "spread":
                rewards[call.id][:] = earned[call.id] / len(rewards[call.id])
            else:
                rewards[call.id][-1] = earned[call.id]
        return rewards


class Trial(TypedDict):
    """What `run_trial` returns. Rows are task-major: the rollouts of a task are consecutive, and so are their rows."""

    padded_token_ids: NDArray[np.int64]
    padded_attn_mask: NDArray[np.int64]
    padded_agent_mask: NDArray[np.int64]
    padded_rewards: NDArray[np.float32]
    padded_logprobs: NDArray[np.float32]
    """Recorded log-probabilities of the agent tokens, 0 elsewhere."""
    final_rewards: NDArray[np.float32]
    """One a rollout; NaN for a rollout that failed."""
    row_rollout: NDArray[np.int64]
    """Which rollout each row belongs to."""
    rollouts: list[Rollout]


def padded(rollouts: Iterable[Rollout], *, pad_id: int, credit: Credit = "spread") -> Trial:
    """Rollouts as the right-padded arrays a trainer takes, every one of shape (rows, tokens)."""
    rollouts = list(rollouts)
    rows: list[Branch] = []
    owner: list[int] = []
    empty = Branch(
        token_ids=np.array([pad_id], np.int32),
        sampled=np.zeros(1, bool),
        agent_mask=np.zeros(1, bool),
        logprobs=np.zeros(1, np.float32),
        rewards=np.zeros(1, np.float32),
        calls=(),
    )
    for index, rollout in enumerate(rollouts):
        of_rollout = rollout.rows(credit) or [empty]
        rows += of_rollout
        owner += [index] * len(of_rollout)
    shape = (len(rows), max((len(row.token_ids) for row in rows), default=0))
    trial = Trial(
        padded_token_ids=np.full(shape, pad_id, np.int64),
        padded_attn_mask=np.zeros(shape, np.int64),
        padded_agent_mask=np.zeros(shape, np.int64),
        padded_rewards=np.zeros(shape, np.float32),
        padded_logprobs=np.zeros(shape, np.float32),
        final_rewards=np.array([math.nan if r.reward is None else r.reward for r in rollouts], np.float32),
        row_rollout=np.array(owner, np.int64),
        rollouts=rollouts,
    )
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        trial["padded_token_ids"][index, :length] = row.token_ids
        trial["padded_attn_mask"][index, :length] = 1
        trial["padded_agent_mask"][index, :length] = row.agent_mask
        trial["padded_rewards"][index, :length] = row.rewards
        trial["padded_logprobs"][index, :length] = row.logprobs * row.agent_mask
    return trial
