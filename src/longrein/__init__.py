"""longrein trains language-model agents by reinforcement learning, in environments we own and in programs we don't.

Names are imported when they are first used: `import longrein` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrein.agents import Agent
    from longrein.contract import (
        AgentSession,
        AgentSessionFactory,
        GenerateAPI,
        LongreinError,
        RolloutMessages,
        Sampling,
        Verdict,
    )
    from longrein.envs.environment import Environment, Episode, Step
    from longrein.envs.harness import HarnessEnv
    from longrein.envs.tools import ToolEpisode, tool
    from longrein.harnesses.process import ProcessSessionFactory
    from longrein.proxy import InterceptionServer
    from longrein.recorder import Recorder
    from longrein.rollout import Call, Rollout
    from longrein.training.config import GRPOEnvConfig
    from longrein.training.trainer import GRPOEnvTrainer
    from longrein.training.worker import HarnessRolloutWorker

__version__ = "0.1.0"

_HOMES = {
    "Agent": "agents",
    "AgentSession": "contract",
    "AgentSessionFactory": "contract",
    "Call": "rollout",
    "Environment": "envs.environment",
    "Episode": "envs.environment",
    "GRPOEnvConfig": "training.config",
    "GRPOEnvTrainer": "training.trainer",
    "GenerateAPI": "contract",
    "HarnessEnv": "envs.harness",
    "HarnessRolloutWorker": "training.worker",
    "InterceptionServer": "proxy",
    "LongreinError": "contract",
    "ProcessSessionFactory": "harnesses.process",
    "Recorder": "recorder",
    "Rollout": "rollout",
    "RolloutMessages": "contract",
    "Sampling": "contract",
    "Step": "envs.environment",
    "ToolEpisode": "envs.tools",
    "Verdict": "contract",
    "tool": "envs.tools",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"longrein.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'longrein' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
