"""The table of settings as flags: a command that takes settings names them, and gets those that were said."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from longrein.training.settings import Settings, setting_types


def with_settings(command: Callable[..., None], names: Sequence[str] | None = None) -> Callable[..., None]:
    """The command with these settings as flags in place of its `**flags`; unsaid, with all of them."""
    own = inspect.signature(command, eval_str=True)
    kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = own.replace(parameters=[*kept, *_flags(names)])  # type: ignore[attr-defined]
    return command


def said(context: typer.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that stood on the command line, as settings."""
    values = {name: value for name, value in flags.items() if _was_said(context, name)}
    if "env_config" in values:
        from longrein.envs.datasets import as_dict

        values["env_config"] = as_dict(values["env_config"], "--env-config")
    return values


def _was_said(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flags(names: Sequence[str] | None) -> list[inspect.Parameter]:
    kinds = setting_types()
    made = []
    for one in (one for one in fields(Settings) if one.metadata and (names is None or one.name in names)):
        kind, default = kinds[one.name], one.default
        if typing.get_origin(kind) is dict:
            kind, default = str, "{}"
        elif typing.get_origin(kind) is tuple:
            kind, default = list[str], []
        plain = typing.get_args(kind)[0] if isinstance(kind, types.UnionType) else kind
        bounds = {} if plain is str else {"min": one.metadata["least"], "max": one.metadata["most"]}
        option = typer.Option(
            help=one.metadata["help"], **{key: value for key, value in bounds.items() if value is not None}
        )
        annotation = Annotated[kind, option]
        made.append(inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return made
