"""Plays recorded calls back: an environment or a program runs again, without a model.

Always true: a request that was recorded gets its recorded reply, ids, log-probabilities, versions and all, in whatever order
requests come. Any other request is an error that shows where it first differs from what was recorded: it is the environment,
the program or the rendering that changed.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from longrein.contract import LongreinError, Sampled, SampleRequest
from longrein.digests import digest_of
from longrein.engines.at_once import AtOnce
from longrein.rollout import Call, Ids, Rollout

SHOWN = 12
"""Tokens shown on either side of a difference."""
Decode = Callable[[Sequence[int]], str]


class ReplayError(LongreinError):
    """A request that was not recorded."""


class ReplayEngine(AtOnce):
    """An engine whose replies are those of recorded rollouts.

    >>> engine = ReplayEngine(trial["rollouts"], decode=tokenizer.decode)                       # doctest: +SKIP
    >>> env.run_trial(tasks, Agent(None, tokenizer, engine=engine, seed=agent.seed))            # doctest: +SKIP

    The calls of one prompt (a group's first calls, say) are told apart by the seed that a request draws its noise from. Rollouts
    that are played under other seeds than they were recorded take them in the order they were recorded, one after the other,
    and none twice. `decode` shows differences as text.
    """

    def __init__(self, rollouts: Iterable[Rollout] | Rollout, *, decode: Decode | None = None) -> None:
        self._decode = decode
        self._lock = threading.Lock()
        self._prompts: list[Ids] = []
        self._calls: dict[bytes, list[tuple[int, Call]]] = defaultdict(list)
        self._given: dict[str, set[int]] = defaultdict(set)
        """A rollout that is played: the calls it was given, by their number in the order they were recorded."""
        self._times: Counter[int] = Counter()
        """How often each call was given."""
        self._seeded: set[str] = set()
        """Rollouts that are played under the seeds they were recorded with."""
        for rollout in [rollouts] if isinstance(rollouts, Rollout) else rollouts:
            for call in rollout.calls.values():
                prompt = rollout.prompt(call.id)
                self._calls[_key(prompt)].append((len(self._prompts), call))
                self._prompts.append(prompt)
        if not self._prompts:
            raise ReplayError("the rollouts to replay have no calls; there is nothing to answer with")

    async def sample(self, request: SampleRequest) -> Sampled:
        prompt = np.asarray(request.prompt_ids, np.int32)
        with self._lock:
            call = self._recorded(prompt, request)
        return Sampled(
            ids=call.completion_ids.tolist(),
            logprobs=call.logprobs.tolist(),
            # That a reply asked for a tool is read from its tokens again.
            finish_reason="stop" if call.finish_reason == "tool_calls" else call.finish_reason,
            policy_version=call.policy_version,
            sampler_logprobs=None if call.sampler_logprobs is None else call.sampler_logprobs.tolist(),
            versions=None if call.versions is None else call.versions.tolist(),
        )

    def _recorded(self, prompt: Ids, request: SampleRequest) -> Call:
        calls = self._calls.get(_key(prompt), [])
        if not calls:
            raise ReplayError(self._difference(prompt))
        given = self._given[request.rollout_id]
        seed = _call_id(request.seed)
        chosen = [(number, call) for number, call in calls if call.id == seed]
        if chosen:
            self._seeded.add(request.rollout_id)
        elif request.rollout_id not in self._seeded:
            chosen = sorted(
                ((number, call) for number, call in calls if number not in given),
                key=lambda one: (self._times[one[0]], one[0]),
            )
        if not chosen:
            raise ReplayError(
                f"this request was not recorded: its prompt of {len(prompt)} tokens was sampled {len(calls)} times in the "
                "record, and is asked for once more"
            )
        number, call = chosen[0]
        if (limit := request.sampling.max_tokens) is not None and len(call.completion_ids) > limit:
            raise ReplayError(
                f"the recorded reply has {len(call.completion_ids)} tokens, and this request allows {limit}: the limits changed"
            )
        given.add(number)
        self._times[number] += 1
        return call

    def _difference(self, prompt: Ids) -> str:
        """Where a prompt first differs from the recorded one that it follows furthest."""
        nearest, at = max(((p, _common(p, prompt)) for p in self._prompts), key=lambda found: (found[1], -len(found[0])))
        if at == len(prompt):
            what = f"ends after {at} tokens, where the nearest recorded prompt goes on with {self._shown(nearest, at)}"
        elif at == len(nearest):
            what = f"goes on after all {at} tokens of the nearest recorded prompt, with {self._shown(prompt, at)}"
        else:
            what = (
                f"differs from the nearest recorded prompt at token {at}: expected {self._shown(nearest, at)}, "
                f"got {self._shown(prompt, at)}"
            )
        after = f"; both follow {self._shown(prompt, max(0, at - SHOWN), at)}" if at else ""
        return f"this request was not recorded: its prompt {what}{after}"

    def _shown(self, ids: Ids, start: int, end: int | None = None) -> str:
        tokens = ids[start : start + SHOWN if end is None else end].tolist()
        return f"{tokens}" if self._decode is None else f"{self._decode(tokens)!r} {tokens}"


def _key(prompt: Ids) -> bytes:
    return digest_of(prompt.tobytes())


def _call_id(seed: int) -> str:
    """The id that the recorder gives a call which draws from this seed."""
    return (seed % 2**64).to_bytes(8, "little").hex()


def _common(a: Ids, b: Ids) -> int:
    """How many tokens two prompts start with alike."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
