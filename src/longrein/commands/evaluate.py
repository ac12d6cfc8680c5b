"""`longrein eval`: how well a model or an endpoint does, and whether one does better than another."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longrein.commands.common import Stopped, checked_sandbox, import_from, model_folder, new_run_folder
from longrein.commands.flags import said, with_settings
from longrein.contract import LongreinError
from longrein.training.settings import Settings, read_run_file, settings_from

if TYPE_CHECKING:
    from longrein.agents import Agent

NAMES = ("model", "env", "env_config", "harness", "verify", "tasks", "temperature", "sandbox", "seed", "out")
"""The settings that an evaluation has, too."""
SOME_FAILED = 3
EXAMPLES = """Play tasks with a model or an OpenAI-compatible endpoint, many at once, and tell how well it does.

Success with Wilson's interval, mean reward and pass@k (unbiased) with a bootstrap over tasks; the rollouts are in a run folder, for
`longrein view`. A run file gives the settings that it shares with training. The same command with the same --out goes on with an
evaluation that was stopped or killed. Exit code 3 when some rollouts failed on our side.

Examples: `longrein eval --model runs/latest/model --rollouts 4` · `longrein eval run.toml --heldout --model runs/latest/model` ·
`longrein eval --endpoint https://api.example.com/v1 --model some-model --key-env EXAMPLE_API_KEY --env longrein.envs.Calculator` ·
`longrein eval --compare runs/a/eval.json runs/b/eval.json`
"""


def command(
    context: typer.Context,
    run_file: Annotated[Path | None, typer.Argument(help="A run file, as of `longrein train`.", show_default=False)] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Base url of an OpenAI-compatible endpoint that has --model, such as http://127.0.0.1:8000/v1."),
    ] = None,
    key_env: Annotated[str, typer.Option(help="The variable that holds the endpoint's key.")] = "OPENAI_API_KEY",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that an endpoint may take for an answer.")] = 600.0,
    count: Annotated[int, typer.Option(min=1, help="Tasks to play, of those that there are.")] = 128,
    heldout: Annotated[
        bool, typer.Option("--heldout", help="Play the tasks that training with these settings keeps for its table.")
    ] = False,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of each task; pass@k is told up to this k.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Rollouts at a time. Unsaid: 256, and 8 programs.", show_default=False)
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two results to compare task by task, instead of playing.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    **flags: Any,
) -> None:
    if compare is not None:
        _compare(*compare, as_json=as_json)
        return
    if run_file is not None:
        import_from(run_file.parent)
    from_file = {} if run_file is None else read_run_file(run_file)
    from_file.pop("out", None)  # the run's, not the evaluation's
    settings = settings_from(from_file, said(context, flags))
    checked_sandbox(settings.sandbox)
    if endpoint is not None and "model" not in {**from_file, **said(context, flags)}:
        raise LongreinError(f"--endpoint is {endpoint!r} and no --model is said: which of its models is to be evaluated?")
    folder = Path(settings.out) if settings.out else new_run_folder("eval")
    rows = _rows(settings, count, heldout)
    asked = None if endpoint is None else {"url": endpoint, "key": os.environ.get(key_env), "seconds": timeout}
    results = _evaluate(settings, rows, folder, asked, rollouts=rollouts, concurrency=concurrency)
    overall = results["overall"]
    if as_json:
        print(json.dumps({**results, "folder": str(folder)}))
    elif overall["failed"] < overall["rollouts"]:
        from longrein.display import show_evaluation

        show_evaluation(results, folder)
    if not results["complete"]:
        played = f"stopped after {overall['rollouts']} of {len(rows) * rollouts} rollouts"
        raise Stopped(f"{played}, which are kept in {folder}; go on with: {_the_same(settings.out, folder)}")
    if overall["failed"] == overall["rollouts"]:
        print(f"longrein: every rollout failed; the first cause: {overall['first_failure']}", file=sys.stderr)
        raise typer.Exit(1)
    raise typer.Exit(SOME_FAILED if overall["failed"] else 0)


def _evaluate(
    settings: Settings,
    rows: list[dict[str, Any]],
    folder: Path,
    endpoint: dict[str, Any] | None,
    *,
    rollouts: int,
    concurrency: int | None,
) -> dict[str, Any]:
    from longrein.display import EvalDisplay
    from longrein.evaluation import RESULTS, earlier_rollouts, evaluate, with_concurrency

    with EvalDisplay() as display:
        if endpoint is None:
            settings = replace(settings, model=model_folder(settings.model, display.note))
        about = {name: getattr(settings, name) for name in NAMES} | {"weights": _stamp(settings.model), "rollouts": rollouts}
        about["endpoint"] = None if endpoint is None else endpoint["url"]
        if earlier := earlier_rollouts(folder, about):
            display.note(f"going on with {folder}: {len(earlier)} rollouts were played before")
        agent, pieces = _agent(settings, endpoint, folder, display.note)
        display.start(len(rows) * rollouts)
        try:
            return evaluate(
                agent,
                with_concurrency(rows, concurrency),
                folder,
                rollouts=rollouts,
                pieces=pieces,
                about=about,
                earlier=earlier,
                progress=display.finished,
            )
        except KeyboardInterrupt:
            return json.loads((folder / RESULTS).read_text())
        finally:
            agent.engine.cancel()  # after Ctrl-C, replies that nobody waits for
            agent.engine.close()


def _stamp(model: str) -> str | None:
    """What tells the weights in a folder from others that stood there before."""
    files = [*Path(model).glob("*.safetensors"), *Path(model).glob("*.bin")]
    newest = max((path.stat().st_mtime_ns for path in files), default=0)
    return f"{sum(path.stat().st_size for path in files)} bytes of {newest}" if files else None


def _the_same(out: str | None, folder: Path) -> str:
    """This command, with the folder that it chose."""
    return shlex.join(["longrein", *sys.argv[1:], *([] if out else ["--out", str(folder)])])


def _rows(settings: Settings, count: int, heldout: bool) -> list[dict[str, Any]]:
    from longrein.envs.environment import Environment
    from longrein.noise import derive
    from longrein.training.rows import in_sandbox, rows_of
    from longrein.training.trials import check_rows, environment_class

    if heldout:
        return rows_of(settings)[1][:count]
    if settings.tasks is not None:
        from longrein.envs.datasets import read_tasks

        rows = read_tasks(settings.tasks, env_class_path=settings.env, env_config=settings.env_config)[:count]
    else:
        cls = environment_class(settings.env)
        if not issubclass(cls, Environment):
            raise LongreinError(f"{settings.env} makes no tasks of its own; name a dataset (`--tasks`)")
        cls.check_config(settings.env_config)
        made = cls.tasks(count, seed=derive(settings.seed, "evaluation"), env_config=settings.env_config)
        rows = [{"env_class_path": settings.env, "env_config": settings.env_config, "task_data": task} for task in made]
    check_rows(rows)
    return in_sandbox(rows, settings)


def _agent(settings: Settings, endpoint: dict[str, Any] | None, folder: Path, note: Any) -> tuple[Agent, Any]:
    from longrein.agents import Agent
    from longrein.contract import Sampling

    sampling = Sampling(temperature=settings.temperature)
    if endpoint is not None:
        from longrein.engines.endpoint import EndpointEngine, Words
        from longrein.runs import Run
        from longrein.runs.schema import FILE

        words: Any = Words(Run(folder).pieces() if (folder / FILE).exists() else None)
        engine = EndpointEngine(model=settings.model, words=words, **endpoint)
        return Agent(None, words, engine=engine, rendering=words, sampling=sampling, seed=settings.seed), words.pieces
    note(f"loading {settings.model}")
    from longrein.runs.pieces import Pieces

    agent = load_agent(settings.model, sampling=sampling, seed=settings.seed)
    return agent, Pieces(agent.tokenizer)


def load_agent(model: str, **kwargs: Any) -> Agent:
    """A model to use and not to train: on the GPU, in half precision, where there is one."""
    import torch

    from longrein.agents import Agent

    gpu = torch.cuda.is_available()
    agent = Agent.from_pretrained(model, dtype=torch.bfloat16 if gpu else None, **kwargs)
    if gpu and agent.policy_model is not None:
        agent.policy_model.to("cuda")  # type: ignore[arg-type]
    if agent.tokenizer.pad_token_id is None:
        agent.tokenizer.pad_token = agent.tokenizer.eos_token
    return agent


def _compare(first: Path, second: Path, *, as_json: bool) -> None:
    from longrein.evaluation import read_results
    from longrein.figures import compared

    comparison = compared(read_results(first)[1], read_results(second)[1])
    if as_json:
        print(json.dumps({"a": str(first), "b": str(second), **comparison}))
        return
    from longrein.display import show_comparison

    show_comparison(comparison, first, second)


def register(app: typer.Typer) -> None:
    app.command("eval", help=EXAMPLES)(with_settings(command, NAMES))
