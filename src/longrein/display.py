"""What `longrein train` and `longrein eval` show: stages, a live line a person can read, and the closing tables."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
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
                "reward {task.fields[reward]:.2f}  success {task.fields[success]:.0%}{task.fields[failed]}  "
                "{task.fields[speed]:,.0f} tokens/s"
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
            before = event["before"]
            if before.success is not None:
                self.note(f"before: {before.success:.0%} of held-out tasks solved")
            if before.failed:
                self._failed(before.failed, "before training", before.cause)
            self._progress.start()
            self._task = self._progress.add_task(
                "train", total=event["steps"], reward=0.0, success=0.0, failed="", speed=0.0
            )
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
        failed = f"  failed {event['failed']:.0%}" if event.get("failed") else ""
        self._progress.update(
            self._task, completed=event["step"], reward=reward, success=success, failed=failed, speed=speed
        )
        if not self.console.is_terminal:
            self.console.print(
                f"step {event['step']}  reward {reward:.2f}  success {success:.0%}{failed}  {speed:,.0f} tokens/s",
                highlight=False,
            )

    def _failed(self, count: int, when: str, cause: str) -> None:
        self.console.print(
            f"[red]{count} held-out rollouts failed {when}[/red] and count as not solved; the first cause: {escape(cause)}",
            highlight=False,
        )

    def summary(self, summary: dict[str, Any], folder: Path) -> None:
        table = Table(title=f"held-out tasks ({summary['heldout_tasks']}), seed {summary['seed']}", title_justify="left")
        for column in ("", "before", "after"):
            table.add_column(column, justify="right" if column else "left")
        for name, rates in summary["by_env"].items():
            table.add_row(f"success, {name}", f"{rates['before']:.1%}", f"{rates['after']:.1%}")
        rewards = (summary["heldout_reward_before"], summary["heldout_reward_after"])
        table.add_row("reward, mean", *("–" if reward is None else f"{reward:.3f}" for reward in rewards))
        self.console.print(table)
        if summary["heldout_failed"]:
            self._failed(summary["heldout_failed"], "before and after", summary["heldout_failure"])
        self.console.print(
            f"{summary['steps']} steps in {summary['seconds']:.0f} s · {folder}/summary.json · {folder}/model\n"
            f"look at it: longrein view {folder}",
            highlight=False,
        )


class EvalDisplay:
    """A progress bar on stderr, so that what is on stdout can be piped; plain lines where there is no terminal."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f} rollouts"),
            BarColumn(bar_width=None),
            TextColumn("success {task.fields[success]:.0%}  reward {task.fields[reward]:.2f}  failed {task.fields[failed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task: Any = None
        self._lock = threading.Lock()
        self._scored, self._solved, self._failed, self._reward = 0, 0, 0, 0.0

    def __enter__(self) -> EvalDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        self.console.print(f"[dim]{escape(text)}[/dim]", highlight=False)

    def start(self, total: int) -> None:
        self.note(f"playing {total} rollouts")
        self._progress.start()
        self._task = self._progress.add_task("eval", total=total, success=0.0, reward=0.0, failed=0)

    def finished(self, rollout: Any) -> None:
        with self._lock:  # rollouts end in any thread
            if rollout.failed is not None:
                self._failed += 1
            else:
                self._scored += 1
                self._solved += bool(rollout.success)
                self._reward += rollout.reward
            scored = max(1, self._scored)
            self._progress.update(
                self._task, advance=1, success=self._solved / scored, reward=self._reward / scored, failed=self._failed
            )


def show_evaluation(results: dict[str, Any], folder: Path) -> None:
    console, about = _console(), results["about"]
    overall = results["overall"]
    title = f"{about['model']}, {overall['tasks']} tasks x {about['rollouts']}, temperature {about['temperature']:g}"
    table = Table(title=escape(title), title_justify="left")
    for column in ("", "tasks", "failed", "success, 95%", "reward, 95%", "turns", "tokens"):
        table.add_column(column, justify="right" if column else "left")
    parts = {"all": overall} if len(results["by_env"]) == 1 else {"all": overall, **results["by_env"]}
    for name, part in parts.items():
        if "success" not in part:
            table.add_row(escape(name), str(part["tasks"]), str(part["failed"]), "-", "-", "-", "-")
            continue
        told = (_interval(part["success"], "{:.1%}"), _interval(part["reward"], "{:.3f}"))
        table.add_row(
            escape(name), str(part["tasks"]), str(part["failed"]), *told, f"{part['turns']:.1f}", f"{part['tokens']:.0f}"
        )
    console.print(table)
    if len(passed := overall.get("pass_at_k", {})) > 1:
        console.print(" · ".join(f"pass@{k} {_interval(one, '{:.1%}')}" for k, one in passed.items()), highlight=False)
    if overall["failed"]:
        console.print(
            f"[red]{overall['failed']} rollouts failed[/red] on our side and are in no figure; the first cause: "
            f"{escape(overall['first_failure'])}",
            highlight=False,
        )
    if "success" in overall:
        methods = f"success: {overall['success']['method']}; reward, pass@k: {overall['reward']['method']}"
        console.print(f"[dim]{methods}[/dim]", highlight=False)
    console.print(f"{results['seconds']:.0f} s · {folder}/eval.json · longrein view {folder}", highlight=False)


def show_comparison(comparison: dict[str, Any], first: Path, second: Path) -> None:
    console = _console()
    table = Table(title=escape(f"A {first}  B {second}"), title_justify="left")
    for column in ("", "A", "B", "B - A, 95%", "p", "better", "worse"):
        table.add_column(column, justify="right" if column else "left")
    for row in comparison["figures"]:
        form = "{:.1%}" if row["name"] == "success" else "{:.3f}"
        sides = (form.format(row["a"]), form.format(row["b"]), _interval(row["difference"], form))
        table.add_row(row["name"], *sides, _p(row["p_value"]), str(row["better"]), str(row["worse"]))
    console.print(table)
    apart = comparison["only_a"] + comparison["only_b"]
    left_out = f"; {apart} that only one of them has are left out" if apart else ""
    console.print(
        f"[dim]{comparison['tasks']} tasks in both{left_out}. Interval: {comparison['figures'][0]['difference']['method']}, paired; "
        "p: sign-flip test over tasks.[/dim]",
        highlight=False,
    )


def _console() -> Console:
    """As wide as the terminal; piped, wide enough for the tables."""
    return Console() if sys.stdout.isatty() else Console(width=120)


def _p(value: float) -> str:
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _interval(estimate: dict[str, Any], form: str) -> str:
    value = form.format(estimate["value"])
    if estimate["low"] is None:
        return value
    return f"{value} \\[{form.format(estimate['low'])}, {form.format(estimate['high'])}]"
