"""Environments: loops we own, and harnesses and other libraries' environments as such."""

from longrein.envs.datasets import load_tasks, task_dataset
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment, Episode, Step, class_path
from longrein.envs.hunt import TreasureHunt
from longrein.envs.tools import ToolEpisode, tool

__all__ = [
    "EnvConfig",
    "EnvConfigError",
    "Environment",
    "Episode",
    "Step",
    "ToolEpisode",
    "TreasureHunt",
    "class_path",
    "load_tasks",
    "task_dataset",
    "tool",
]
