"""What `longrein train` shows while it runs: stages, a live line a person can read, and the closing table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

STAGES = {
    "load": "loading {model}",
    "before": "before: playing {tasks} held-out tasks",
    "after": "after: playing {tasks} held-out tasks",
}


class TrainDisplay:
    """A progress bar with step, reward, success, tokens a second and time left; plain lines where there is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn(
                "reward {task.fields[reward]:.2f}  success {task.fields[success]:.0%}  {task.fields[speed]:,.0f} tokens/s"
            ),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task: Any = None
        self._tokens, self._time = 0.0, 0.0

    def __enter__(self) -> TrainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        self.console.print(f"[dim]{text}[/dim]", highlight=False)

    def event(self, event: dict[str, Any]) -> None:
        stage = event["stage"]
        if stage == "train":
            self.note(f"before: {event['before'].success:.0%} of held-out tasks solved")
            self._progress.start()
            self._task = self._progress.add_task("train", total=event["steps"], reward=0.0, success=0.0, speed=0.0)
        elif stage == "step":
            self._step(event)
        else:
            if stage == "after":
                self._progress.stop()
            self.note(STAGES[stage].format(**event))

    def _step(self, event: dict[str, Any]) -> None:
        tokens, now = event.get("num_tokens", 0.0), event["time"]
        speed = (tokens - self._tokens) / (now - self._time) if self._time else 0.0
        self._tokens, self._time = tokens, now
        reward, success = event["reward"] or 0.0, event.get("success") or 0.0
        self._progress.update(self._task, completed=event["step"], reward=reward, success=success, speed=speed)
        if not self.console.is_terminal:
            self.console.print(
                f"step {event['step']}  reward {reward:.2f}  success {success:.0%}  {speed:,.0f} tokens/s",
                highlight=False,
            )

    def summary(self, summary: dict[str, Any], folder: Path) -> None:
        table = Table(title=f"held-out tasks ({summary['heldout_tasks']}), seed {summary['seed']}", title_justify="left")
        for column in ("", "before", "after"):
            table.add_column(column, justify="right" if column else "left")
        for name, rates in summary["by_env"].items():
            table.add_row(f"success, {name}", f"{rates['before']:.1%}", f"{rates['after']:.1%}")
        table.add_row("reward, mean", f"{summary['heldout_reward_before']:.3f}", f"{summary['heldout_reward_after']:.3f}")
        self.console.print(table)
        if summary["heldout_failed"]:
            self.console.print(
                f"[red]{summary['heldout_failed']} held-out rollouts failed[/red] and count as not solved; "
                f"the first cause: {summary['heldout_failure']}",
                highlight=False,
            )
        self.console.print(
            f"{summary['steps']} steps in {summary['seconds']:.0f} s · {folder}/summary.json · {folder}/model\n"
            f"look at it: longrein view {folder}",
            highlight=False,
        )
