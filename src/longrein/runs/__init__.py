"""A run on disk: one folder, one SQLite file with every rollout to the token; written as rollouts finish, read back as such."""

from longrein.runs.reader import Run
from longrein.runs.writer import RunWriter

__all__ = ["Run", "RunWriter"]
