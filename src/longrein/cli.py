"""The command line: `longrein train`, `longrein serve-vllm`, `longrein harness`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from longrein.contract import LongreinError
from longrein.harnesses import commands as harness_commands

if TYPE_CHECKING:
    from longrein.training.job import Settings

app = typer.Typer(
    help="Train language-model agents by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(harness_commands.app, name="harness")

TRAINING = ("torch", "transformers", "trl", "datasets", "accelerate", "peft")
TINY = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "longrein" / "tiny"


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and everything that is logged.")] = False,
) -> None:
    """Train language-model agents by reinforcement learning, in environments and in agent programs."""
    sys.path.insert(0, os.getcwd())  # environments and verifiers of the user's own folder are named by dotted path
    # Threads that wait for work sleep rather than spin: harness programs need the cores too. Set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=logging.INFO if debug else logging.ERROR, format="%(name)s: %(message)s")
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@app.command()
def train(
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of a causal model with a chat template. Unsaid: the small policy.")
    ] = None,
    env: Annotated[str, typer.Option(help="Dotted path of the environment class.")] = "longrein.envs.TreasureHunt",
    env_config: Annotated[str, typer.Option(help="The environment's settings, as JSON.")] = "{}",
    tasks: Annotated[
        str | None,
        typer.Option(
            help="JSONL or parquet file, folder saved by `datasets`, or hub name. Unsaid: the environment's own tasks."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 44,
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Tasks in a step.")] = 8,
    num_generations: Annotated[int, typer.Option(min=2, help="Rollouts of each task.")] = 8,
    micro_batch: Annotated[int, typer.Option(min=1, help="Rollouts in a forward and backward pass.")] = 64,
    learning_rate: Annotated[float | None, typer.Option(help="Unsaid: 3e-4 for the small policy, 1e-6 for others.")] = None,
    beta: Annotated[float, typer.Option(min=0, help="Weight of the KL divergence from the starting policy.")] = 0.0,
    loss_type: Annotated[str, typer.Option(help="TRL's name of the loss.")] = "dapo",
    advantages: Annotated[str, typer.Option(help="rewards, group, turn, return or leave_one_out.")] = "group",
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature.")] = 1.0,
    lora_rank: Annotated[int, typer.Option(min=0, help="Train a LoRA adapter of this rank instead of all weights.")] = 0,
    heldout: Annotated[int, typer.Option(min=0, help="Tasks kept for the before / after table.")] = 128,
    program_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the hunts played by the ReAct program, as a process.")
    ] = 0.0,
    sandbox: Annotated[
        str, typer.Option(help="Where agent programs run: auto (bubblewrap where it works), bubblewrap, or none.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of tasks, order and sampling.")] = 0,
    vllm: Annotated[
        list[str] | None,
        typer.Option(
            help="Url of a `longrein serve-vllm` server of this model, to sample there; may be said several times."
        ),
    ] = None,
    vllm_folder: Annotated[
        Path | None, typer.Option(help="A folder that servers on other machines can read, for the weights on their way.")
    ] = None,
    report_to: Annotated[list[str] | None, typer.Option(help="TRL's trackers: trackio, wandb, tensorboard.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. Unsaid: a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run that was stopped, with the settings it had.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="A run of a minute, to see that a model loads, plays and trains.")
    ] = False,
) -> None:
    """Train a policy and compare it before and after on held-out tasks.

    Examples: `longrein train` · `longrein train --model Qwen/Qwen3-0.6B --env my_envs.Shop --steps 100` ·
    `longrein train --model ./my-model --tasks tasks.jsonl --lora-rank 16`
    """
    from longrein.display import TrainDisplay

    with TrainDisplay() as display:
        display.note("loading")
        from longrein.training.job import Settings
        from longrein.training.job import train as run

        if resume is not None:
            settings = _settings_of(resume)
        else:
            small = model is None or Path(model).name == "tiny"
            settings = Settings(
                model=model or str(_tiny(display)),
                env=env,
                env_config=_json_object(env_config, "--env-config"),
                tasks=tasks,
                steps=steps,
                tasks_per_step=tasks_per_step,
                num_generations=num_generations,
                micro_batch=micro_batch,
                learning_rate=learning_rate if learning_rate is not None else 3e-4 if small else 1e-6,
                beta=beta,
                loss_type=loss_type,
                advantages=cast(Any, advantages),  # an unknown name is refused by the trainer's configuration
                temperature=temperature,
                lora_rank=lora_rank,
                heldout=heldout,
                program_share=program_share,
                sandbox=_sandbox(sandbox),
                seed=seed,
                vllm=tuple(vllm or ()),
                vllm_folder=None if vllm_folder is None else str(vllm_folder.absolute()),
                report_to=tuple(report_to or ()),
            )
        if smoke:
            settings = _smoke(settings)
        folder = resume or out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{seed}"
        try:
            summary = run(settings, folder, progress=display.event)
        except KeyboardInterrupt:
            raise typer.Exit(_say_how_to_go_on(folder)) from None
        _point_latest(folder)
        display.summary(summary, folder)


@app.command()
def check(
    command: Annotated[
        list[str], typer.Argument(help="After `--`: the program and its arguments; or a name: react, shell.")
    ],
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a model. Unsaid: a scripted one.")] = None,
    script: Annotated[
        Path | None, typer.Option(help="What the scripted model says: a JSON list of texts or messages.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="A folder to copy into the program's working folder.")] = None,
    readable: Annotated[list[Path] | None, typer.Option(help="More that the program may read, in its sandbox.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE; {url}, {base_url}, {key} and {model} are filled.")
    ] = None,
    sandbox: Annotated[str, typer.Option(help="auto (bubblewrap where it works), bubblewrap, or none.")] = "auto",
    seconds: Annotated[float, typer.Option(min=1, help="How long it may take.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Run an agent program once and tell what training with it would be like. Exit code 0 when every call was token-exact.

    Examples: `longrein check react` · `longrein check -- my-agent --task "Fix the bug"` ·
    `longrein check --folder repo/ --env MY_URL={base_url} -- my-agent`
    """
    from longrein.check import check as run
    from longrein.check import show

    report = run(
        command,
        model=model,
        script=None if script is None else _json_list(script),
        sandbox=_sandbox(sandbox),
        readable=[str(path.resolve()) for path in readable or ()],
        folder=folder,
        env=dict(_pair(text) for text in env or ()),
        timeout=seconds,
    )
    if as_json:
        print(report.as_json())
    else:
        show(report)
    raise typer.Exit(0 if report.exact else 1)


@app.command()
def export(
    run: Annotated[Path | None, typer.Argument(help="The run folder. Unsaid: the newest under runs/.")] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="A .jsonl or .parquet file. Unsaid: a .jsonl file in the run folder, named after the format."),
    ] = None,
    format: Annotated[str, typer.Option(help="messages, prompt-completion, preference or tokens.")] = "messages",
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts with this reward or more.")] = None,
    solved: Annotated[bool, typer.Option("--solved", help="Only rollouts that solved their task.")] = False,
    env: Annotated[str | None, typer.Option(help="Only rollouts of this environment, by its class name.")] = None,
    phase: Annotated[
        str, typer.Option(help="train, eval, before, after, or all: held-out tasks are not in train.")
    ] = "train",
    min_step: Annotated[int | None, typer.Option(help="Only rollouts of this step and later.")] = None,
) -> None:
    """Write a run's rollouts as training data for other trainers.

    Examples: `longrein export` · `longrein export runs/latest --solved --to good.parquet` ·
    `longrein export runs/latest --format prompt-completion --min-reward 0.5`
    """
    from longrein.runs import Run
    from longrein.runs.export import export as write
    from longrein.runs.reader import Filter

    source = Run(run or _newest_run())
    path = to or source.folder / f"{format}.jsonl"
    chosen = Filter(
        phase=None if phase == "all" else phase,
        env=env,
        min_reward=min_reward,
        solved=solved or None,
        min_step=min_step,
        failed=False,
    )
    count = write(source, path, format=format, of=chosen)
    print(f"{count} examples in {path}")


@app.command()
def serve_vllm(
    model: Annotated[str, typer.Argument(help="Folder or hub name of the model.")],
    extra: Annotated[list[str] | None, typer.Argument(help="After `--`: options of `vllm serve` itself.")] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen. Its routes change weights: leave it on loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    dtype: Annotated[str, typer.Option(help="Of the weights there: auto, bfloat16, float16 or float32.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest conversation, in tokens.")] = None,
    lora_rank: Annotated[int, typer.Option(min=0, help="Take LoRA adapters up to this rank.")] = 0,
    nccl: Annotated[bool, typer.Option("--nccl", help="Take weights from TRL's WeightTransferClient, on GPUs.")] = False,
    vllm: Annotated[
        str | None, typer.Option(help="The `vllm` command. Unsaid: LONGREIN_VLLM, the PATH, then .venv-vllm/bin.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="What the server says. Unsaid: vllm-PORT.log.")] = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds until it must be ready.")] = 600.0,
) -> None:
    """Start a vLLM server that training can sample from; Ctrl-C ends it and all it started.

    Examples: `longrein serve-vllm Qwen/Qwen3-0.6B` · `longrein serve-vllm ./my-model --port 8001 -- --tensor-parallel-size 2`
    """
    import signal

    from longrein.engines.vllm_server import VLLMServer

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stops a service ends it as Ctrl-C does
    options = {"dtype": dtype, "max_model_len": max_model_len, "lora_rank": lora_rank, "nccl": nccl, "extra": extra or ()}
    server = VLLMServer(model, host=host, port=port, vllm=vllm, log=log, **options)
    try:
        print(f"starting vLLM (it tells of itself in {server.log})", flush=True)
        server.wait(wait)
        print(f"ready: {server.url}", flush=True)
        server.run()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        server.close()


@app.command()
def view(
    run: Annotated[Path | None, typer.Argument(help="The run folder. Unsaid: the newest under runs/.")] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write one self-contained HTML file instead, to send to somebody.")
    ] = None,
    rollouts: Annotated[
        int, typer.Option(min=1, help="Rollouts such a file holds: the failed ones, then the last ones.")
    ] = 200,
    host: Annotated[str, typer.Option(help="Where the page listens. Anyone who reaches it can read the run.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    browse: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Look at a run, also while it trains.

    Examples: `longrein view` · `longrein view runs/latest --port 8000 --no-browse` · `longrein view runs/latest --export run.html`
    """
    from longrein.runs import Run

    source = Run(run or _newest_run())
    if export is not None:
        from longrein.viewer.page import write_page

        count = write_page(source, export, rollouts=rollouts)
        print(f"{export}: {count} rollouts, {export.stat().st_size / 1e6:.1f} MB")
        return
    from longrein.viewer.server import serve

    try:
        serve(source, host=host, port=port, browse=browse)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def main() -> None:
    """The `longrein` command: errors in one sentence, `--debug` for the traceback."""
    debug = "--debug" in sys.argv
    try:
        app()
    except LongreinError as error:
        if debug:
            raise
        print(f"longrein: {error}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if debug or error.name not in TRAINING:
            raise
        print(f"longrein: {error.name} is not installed; training needs `pip install 'longrein[train]'`", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if debug:
            raise
        print(f"longrein: {type(error).__name__}: {error} (run with --debug for the traceback)", file=sys.stderr)
        sys.exit(1)


def _sandbox(choice: str) -> str:
    """The choice, if there is such; that programs run without one is said, whatever else is logged."""
    from longrein.harnesses.sandbox import CHOICES, logger

    if choice not in CHOICES:
        raise LongreinError(f"--sandbox is {choice!r}; it must be one of {', '.join(CHOICES)}")
    logger.setLevel(min(logging.WARNING, logging.getLogger().level))
    return choice


def _tiny(display: Any) -> Path:
    """The small policy, built the first time."""
    if not (TINY / "model.safetensors").exists():
        display.note("building the small policy (a minute, once)")
        from longrein.training.tiny import build

        build(TINY)
    return TINY


def _smoke(settings: Settings) -> Settings:
    """A few small steps; hunts are made short, with text actions, so that any instruct model may find a coin."""
    from dataclasses import replace

    from longrein.training.job import HUNTS

    short = {"actions": "text", "min_hops": 1, "max_hops": 1, "max_turns": 2, "max_tokens": 192, "max_reply_tokens": 12}
    config = {**(short if settings.env in HUNTS else {}), **settings.env_config}
    return replace(settings, env_config=config, steps=3, tasks_per_step=2, num_generations=4, micro_batch=8, heldout=4)


def _settings_of(folder: Path) -> Settings:
    """The settings of a run that was stopped."""
    from longrein.training.job import Settings

    if not any(folder.glob("checkpoints/checkpoint-*")):
        raise LongreinError(f"{folder} holds no checkpoint to go on from; `longrein train` starts a new run")
    saved = json.loads((folder / "config.json").read_text())
    lists = {name: tuple(saved.get(name, ())) for name in ("report_to", "vllm")}
    return Settings(**{**saved, **lists, "resume": True})


def _say_how_to_go_on(folder: Path) -> int:
    saved = any(folder.glob("checkpoints/checkpoint-*"))
    then = f"go on with: longrein train --resume {folder}" if saved else "nothing was trained yet"
    print(f"\nlongrein: stopped; {then}", file=sys.stderr)
    return 130


def _newest_run() -> Path:
    """The run under runs/ that was written to last."""
    found = [path.parent for path in Path("runs").glob("*/run.sqlite") if not path.parent.is_symlink()]
    if not found:
        raise LongreinError("there is no run under runs/ here; name a run folder, or make one with `longrein train`")
    return max(found, key=lambda folder: max(path.stat().st_mtime for path in folder.glob("run.sqlite*")))


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise LongreinError(f"{option} is not JSON ({error}): {text!r}") from None
    if not isinstance(value, dict):
        raise LongreinError(f"{option} is {text}; it must be a JSON object, such as '{{\"max_turns\": 4}}'")
    return value


def _json_list(path: Path) -> list[Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LongreinError(f"--script {path} cannot be read: {error}") from None
    if not isinstance(value, list):
        raise LongreinError(f"--script {path} must hold a JSON list of texts or messages")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise LongreinError(f"--env is {text!r}; it must be NAME=VALUE")
    return name, value


def _point_latest(folder: Path) -> None:
    """`runs/latest` is the newest run of its folder."""
    latest = folder.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
