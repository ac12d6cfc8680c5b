"""Environments: loops we own, and harnesses and other libraries' environments as such."""

from longrein.envs.calculator import Calculator
from longrein.envs.datasets import load_tasks, task_dataset
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment, Episode, Step, class_path
from longrein.envs.harness import HarnessEnv
from longrein.envs.hunt import TreasureHunt
from longrein.envs.openenv import OpenEnv
from longrein.envs.reasoning_gym import ReasoningGym
from longrein.envs.repo import RepoEnv, load_repo_tasks
from longrein.envs.textarena import TextArena
from longrein.envs.tools import ToolEpisode, tool

__all__ = [
    "Calculator",
    "EnvConfig",
    "EnvConfigError",
    "Environment",
    "Episode",
    "HarnessEnv",
    "OpenEnv",
    "ReasoningGym",
    "RepoEnv",
    "Step",
    "TextArena",
    "ToolEpisode",
    "TreasureHunt",
    "class_path",
    "load_repo_tasks",
    "load_tasks",
    "task_dataset",
    "tool",
]
