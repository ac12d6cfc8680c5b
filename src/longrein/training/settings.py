"""Everything a training job can be told, in one table: `Settings`. The flags of `longrein train` and its run files are made of it.

Always true of settings: every one has the type and the range that its line here says; a name that is none of them was refused with
the nearest that is. Nothing heavy is imported to read this file: `longrein train --help` does.
"""

# ruff: noqa: RUF009 (`_setting` is `dataclasses.field` with a line of help)
from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrein.contract import LongreinError
from longrein.harnesses.catalog import harness

if TYPE_CHECKING:
    from longrein.training.advantages import AdvantageName

HUNTS = ("longrein.envs.TreasureHunt", "longrein.envs.hunt.TreasureHunt")
TINY = "tiny"
"""The small policy by its name, where no folder has it."""


class SettingError(LongreinError):
    """A setting that does not exist, or a value that does not fit it."""


def _setting(default: Any, help: str, *, least: float | None = None, most: float | None = None, path: bool = False) -> Any:
    """One line of the table. `path`: a relative one in a run file is looked for beside the file."""
    about = {"help": help, "least": least, "most": most, "path": path}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a training job can be told."""

    model: str = _setting(
        TINY, "Folder or hub name of a causal model with a chat template; tiny is the small policy.", path=True
    )
    env: str = _setting(HUNTS[0], "Dotted path of the environment class.")
    env_config: dict[str, Any] = _setting({}, "The environment's settings; as a flag, JSON.")
    harness: str | None = _setting(
        None,
        "An agent program that plays the tasks, by its name (`longrein harness list`); with `verify`, or a RepoEnv as `env`.",
    )
    verify: str | None = _setting(None, "Dotted path of a function `(task, outcome) -> reward` for what the program left.")
    tasks: str | None = _setting(
        None,
        "JSONL or parquet file, folder saved by `datasets`, or hub name. Unsaid: the environment's own tasks.",
        path=True,
    )
    steps: int = _setting(44, "Optimizer steps.", least=1)
    tasks_per_step: int = _setting(8, "Tasks in a step.", least=1)
    num_generations: int = _setting(8, "Rollouts of each task.", least=2)
    micro_batch: int = _setting(64, "Rollouts in a forward and backward pass.", least=1)
    learning_rate: float | None = _setting(None, "Unsaid: 3e-4 for the small policy, 1e-6 for others.", least=0)
    beta: float = _setting(0.0, "Weight of the KL divergence from the starting policy.", least=0)
    loss_type: str = _setting("dapo", "TRL's name of the loss.")
    advantages: AdvantageName = _setting("group", "rewards, group, turn, return or leave_one_out.")
    temperature: float = _setting(1.0, "Sampling temperature.", least=0.01)
    lora_rank: int = _setting(0, "Train a LoRA adapter of this rank instead of all weights.", least=0)
    heldout: int = _setting(128, "Tasks kept for the before / after table.", least=0)
    program_share: float = _setting(0.0, "Share of the hunts played by the ReAct program, as a process.", least=0, most=1)
    sandbox: str = _setting("auto", "Where agent programs run: auto (bubblewrap where it works), bubblewrap, or none.")
    save_steps: int = _setting(20, "Steps between checkpoints, to go on from; 0 saves only a run that is stopped.", least=0)
    seed: int = _setting(0, "Seed of tasks, order and sampling.")
    vllm: tuple[str, ...] = _setting(
        (), "Url of a `longrein serve-vllm` server of this model, to sample there; may be said several times."
    )
    vllm_folder: str | None = _setting(
        None, "A folder that servers on other machines can read, for the weights on their way.", path=True
    )
    report_to: tuple[str, ...] = _setting((), "TRL's trackers: trackio, wandb, tensorboard; may be said several times.")
    out: str | None = _setting(None, "The run folder. Unsaid: a new one under runs/.")

    resume: bool = False
    """Go on from the newest checkpoint in the folder: no setting of a run, but of one time it is started."""

    def __post_init__(self) -> None:
        for name, kind in setting_types().items():
            object.__setattr__(self, name, _fitting(name, getattr(self, name), kind))

    @property
    def rate(self) -> float:
        """The learning rate, also where it was not said."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 3e-4 if Path(self.model).name == TINY else 1e-6


def setting_types() -> dict[str, Any]:
    """The settings by name, with the type of each; `resume` is none."""
    known = {"AdvantageName": str, **globals()}
    hints = typing.get_type_hints(Settings, globalns=known)
    return {one.name: hints[one.name] for one in fields(Settings) if one.metadata}


def refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuse a name that is none of those known, with the nearest that is."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It knows {', '.join(known)}."
            raise SettingError(f"{where} has no setting {name!r}. {hint}")


def read_run_file(path: Path) -> dict[str, Any]:
    """The settings that a TOML file says, checked; relative paths that are there beside the file are made to be found."""
    try:
        said = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingError(f"there is no run file {str(path)!r}; `longrein init NAME` writes a project with one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the run file {str(path)!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path} is not TOML: {error}") from None
    kinds = setting_types()
    refuse_unknown(said, kinds, str(path))
    for name, value in said.items():
        try:
            said[name] = _fitting(name, value, kinds[name])
        except SettingError as error:
            raise SettingError(f"{path}: {error}") from None
    for one in fields(Settings):
        if one.metadata.get("path") and isinstance(value := said.get(one.name), str) and (path.parent / value).exists():
            said[one.name] = str(path.parent / value)
    return said


def settings_from(run_file: Mapping[str, Any], flags: Mapping[str, Any]) -> Settings:
    """The settings of a run; flags win, one by one, also within `env_config`."""
    both = {**run_file, **flags}
    if "env_config" in run_file and "env_config" in flags:
        both["env_config"] = {**run_file["env_config"], **flags["env_config"]}
    return _with_program(Settings(**both))


def _with_program(settings: Settings) -> Settings:
    """A program that was named is the environment: by itself, or in the one that was named to play in."""
    if settings.harness is None:
        if settings.verify is not None:
            raise SettingError("verify is said and harness is not; it judges what an agent program left")
        return settings
    harness(settings.harness)  # refused here where there is none of that name
    env = "longrein.envs.HarnessEnv" if settings.env in HUNTS else settings.env
    if env == "longrein.envs.HarnessEnv" and (settings.verify is None or settings.tasks is None):
        raise SettingError(
            f"harness is {settings.harness!r}: say which tasks it gets (tasks, each with an `instruction`) and who judges it "
            "(verify, a dotted path), or an environment that knows both (env = 'longrein.envs.RepoEnv')"
        )
    config = {"program": settings.harness, "command": [], **settings.env_config}
    if settings.verify is not None:
        config["verify"] = settings.verify
    return replace(settings, env=env, env_config=config)


def _fitting(name: str, value: Any, kind: Any) -> Any:
    """The value as this setting's type; refused by name."""
    optional = typing.get_origin(kind) is types.UnionType
    if optional and value is None:
        return None
    plain = typing.get_args(kind)[0] if optional else kind
    about = next(one for one in fields(Settings) if one.name == name).metadata
    if plain == tuple[str, ...] and isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    if plain is str and isinstance(value, Path):
        value = str(value)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    expected = typing.get_origin(plain) or plain
    if expected is tuple or not isinstance(value, expected) or isinstance(value, bool):
        raise SettingError(f"{name} is {value!r}; it must be {_in_words(plain, about)}")
    low, high = about["least"], about["most"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise SettingError(f"{name} is {value!r}; it must be {_in_words(plain, about)}")
    return value


def _in_words(kind: Any, about: Mapping[str, Any]) -> str:
    words = {str: "a text", int: "a whole number", float: "a number", tuple[str, ...]: "a list of texts"}
    text = words.get(kind, "a table of settings")
    low, high = about["least"], about["most"]
    if low is not None and high is not None:
        return f"{text} from {low} to {high}"
    return text if low is None else f"{text} of {low} or more"


def saved_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run that was stopped."""
    if not any(folder.glob("checkpoints/checkpoint-*/longrein_state_0.pt")):
        raise LongreinError(f"{folder} holds no checkpoint to go on from; `longrein train` starts a new run")
    saved = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in saved.items() if name in setting_types()}


def refuse_taken(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that a new run cannot be written to."""
    from longrein.runs.schema import FILE

    if folder.is_file():
        raise SettingError(f"out is {str(folder)!r}, which is a file; a run is a folder: give it another name")
    if (folder / FILE).exists() and not resume:
        raise SettingError(f"{folder} holds a run already; go on with it (--resume {folder}) or give this one another --out")
