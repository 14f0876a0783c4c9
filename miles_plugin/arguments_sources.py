"""Where settings come from: flags, the environment, a YAML file, the defaults, in this order of precedence."""

import argparse
import datetime
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import shtab
import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
)

from miles_plugin.arguments import ENV_PREFIX, GROUPS, TrainConfig
from mooncake_store.config import VARIABLES
from mooncake_store.errors import ConfigError

_STORE = "mooncake_store_init_kwargs"
# How --help shows the type of a flag's value.
_METAVARS = {"dict[str,Any]": "JSON", "{Path,null}": "PATH", "Path": "PATH", "{str,null}": "NAME", "str": "NAME",
             "int": "N", "float": "X", "{list[str],null}": "HOST:PORT"}  # fmt: skip

_WHOLE, _NUMBER, _TRUTH = "allowed: a whole number", "allowed: a number", "allowed: true or false"
_QUOTES = "; in YAML put it in quotes"
# What the settings library finds wrong, by its name for it, as what is allowed. Its own words name Python's types.
_ALLOWED = {
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_from_float": _WHOLE, "int_parsing_size": _WHOLE,
    "float_type": _NUMBER, "float_parsing": _NUMBER, "finite_number": "allowed: a finite number",
    "bool_type": _TRUTH, "bool_parsing": _TRUTH,
    "string_type": f"allowed: text{_QUOTES}", "path_type": f"allowed: a path{_QUOTES}",
    "dict_type": "allowed: a mapping of names to values",
    "list_type": "allowed: a list", "too_short": "allowed: one or more",
    "greater_than": "allowed: more than {gt}", "greater_than_equal": "allowed: {ge} or more",
    "less_than": "allowed: less than {lt}", "less_than_equal": "allowed: {le} or less",
    "literal_error": "allowed: {expected}",
    "string_pattern_mismatch": "allowed: text of the form {pattern}",
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of exiting, and names the nearest flag, or the flag before a stray value."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_settings(self, argv: Sequence[str]) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(list(argv))
        if unknown:
            self._refuse(unknown[0], argv)
        return parsed

    def _refuse(self, argument: str, argv: Sequence[str]) -> NoReturn:
        takes_value = {flag: action.nargs != 0 for action in self._actions for flag in action.option_strings}
        if re.match(r"-[^\d.]", argument):
            flag = argument.partition("=")[0]
            self.error(f"unknown flag {flag}{_nearest(flag, takes_value)}; see {self.prog} --help")
        before: list[str] = []  # a value of a flag may look like the stray one
        for previous, current in pairwise(["", *argv]):
            if current == argument and not takes_value.get(previous):
                break
            before.append(current)
        flag = next((word.partition("=")[0] for word in reversed(before) if word.partition("=")[0] in takes_value), "")
        takes = f" after {flag}, which takes {'one value' if takes_value[flag] else 'none'}" if flag else ""
        self.error(f"stray value {argument!r}{takes}; see {self.prog} --help")


class _Loader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice: YAML would silently take the last one's value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                raise ConfigError(
                    f"--config {self.name}: {key.value!r} is set twice, in line {lines[key.value]} and in line {line}; "
                    "keep one"
                )
            lines[str(key.value)] = line
        return node


def load_config(argv: Sequence[str]) -> TrainConfig:
    """Resolve the settings of a job from `argv` (flags, `--config FILE`), the environment and the defaults.

    Raises what `load_config_and_origins` does.
    """
    return load_config_and_origins(argv)[0]


def load_config_and_origins(argv: Sequence[str]) -> tuple[TrainConfig, dict[str, str]]:
    """Like `load_config`, with where each setting that is not a default came from.

    The keys of a mapping have an origin of their own, under their own name.

    Raises:
        ConfigError: an unknown key or flag (with the nearest known one), or a value of the wrong type or out of
            range; the message names the setting, the value and where it came from.
    """
    parser, cli = settings_parser()
    _check_json(argv, os.environ)
    _check_environment(os.environ)
    parsed = parser.parse_settings(argv)
    config_path: Path | None = parsed.config
    from_yaml = _read_yaml(config_path) if config_path else {}
    del parsed.config
    cli(parsed_args=parsed)
    return _merge(cli, from_yaml, str(config_path))


def with_origins(message: str, origins: Mapping[str, str]) -> str:
    """An error's message with where the settings that it names came from, unless it says that itself."""
    named = [
        f"{name} from {origin}"
        for name, origin in origins.items()
        if re.search(rf"\b{name} ?=", message) and f"(from {origin})" not in message
    ]
    return f"{message} [{', '.join(named)}]" if named else message


def settings_parser(
    prog: str = "miles-mooncake train",
) -> tuple[_Parser, CliSettingsSource[argparse.ArgumentParser]]:
    """The parser of every setting as a flag, in its groups, and the settings source that takes what it parsed."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [--config FILE] [--SETTING VALUE ...]",
        description="Run the main job: rollout, training and weight updates, until --num-rollout rollouts are done.",
        epilog=f"Every setting can also stand in FILE, under the same name with underscores, or in the environment as "
        f"{ENV_PREFIX}<NAME>. A flag wins over the environment, that over FILE, that over the default.",
        allow_abbrev=False,
    )
    file = parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of settings, named like the flags"
    )
    file.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    groups = {}
    for group in GROUPS:
        section = parser.add_argument_group(*(group.__doc__ or "").split(": ", 1))
        groups.update(dict.fromkeys(group.model_fields, section))
    cli: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        TrainConfig,
        cli_parse_args=False,
        root_parser=parser,
        add_argument_method=lambda _parser, *names, **options: _add_flag(groups, *names, **options),
        parse_args_method=lambda root, args: root.parse_args(args),
    )
    return parser, cli


def _check_json(argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse JSON that does not parse, with the place; the settings library only says that it does not."""
    for name, field in TrainConfig.model_fields.items():
        if field.annotation != dict[str, Any]:
            continue
        flag, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
        given = [(flag, text) for option, text in pairwise(argv) if option == flag and not text.startswith("-")]
        given += [(flag, option.partition("=")[2]) for option in argv if option.startswith(f"{flag}=")]
        given += [(variable, environment[variable])] if environment.get(variable) else []
        for origin, text in given:
            try:
                value = json.loads(text, object_pairs_hook=_without_duplicates)
            except json.JSONDecodeError as error:
                place = f"line {error.lineno}, column {error.colno}"
                raise ConfigError(f"{origin}: not JSON at {place}: {error.msg}: {text!r}") from None
            except _SetTwice as key:
                raise ConfigError(f"{origin}={text!r}: {key} is set twice; keep one") from None
            if not isinstance(value, dict):
                raise ConfigError(f"{origin}={text!r}: expected a JSON object, found {type(value).__name__}")


class _SetTwice(Exception):
    """A key that a JSON object has twice: the parser would silently take the last one's value."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _SetTwice(repr(key))
        found[key] = value
    return found


def _check_environment(environment: Iterable[str]) -> None:
    known = [f"{ENV_PREFIX}{name.upper()}" for name in TrainConfig.model_fields]
    for name in environment:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ConfigError(f"unknown variable {name} in the environment{_nearest(name, known)}")


def _add_flag(groups: dict[str, Any], *names: str, **options: Any) -> argparse.Action:
    dest = names[-1].removeprefix("--").replace("-", "_").removeprefix("no_")
    options["help"] = options["help"].replace("default factory: dict", "default: {}")
    options["metavar"] = _METAVARS.get(options.get("metavar", ""), options.get("metavar"))
    if options["metavar"] == "HOST:PORT":  # as many as follow the flag, which may come again
        options.update(action="extend", nargs="+")
    action: argparse.Action = groups[dest].add_argument(*names, **options)
    if options["metavar"] == "PATH":
        action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    return action


def _merge(
    cli: PydanticBaseSettingsSource, from_yaml: dict[str, Any], yaml_name: str
) -> tuple[TrainConfig, dict[str, str]]:
    sources: dict[str, PydanticBaseSettingsSource] = {}

    class Resolved(TrainConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            yaml_settings = InitSettingsSource(settings_cls, from_yaml)
            environment = EnvSettingsSource(settings_cls, env_ignore_empty=True)
            sources.update({"the command line": cli, "the environment": environment, yaml_name: yaml_settings})
            return tuple(sources.values())

    try:
        resolved = Resolved()
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item, sources) for item in error.errors())) from None
    values = dict(resolved)
    values[_STORE] = _environment_over_file(values[_STORE], sources, yaml_name)
    if resolved.rollout_external and "rollout_num_gpus" not in resolved.model_fields_set:
        engines = resolved.rollout_external_engine_addrs or [""]
        values["rollout_num_gpus"] = len(engines) * resolved.rollout_num_gpus_per_engine
    return TrainConfig.model_construct(**values), _origins(sources, values[_STORE])


def _origins(sources: Mapping[str, PydanticBaseSettingsSource], store: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for label, source in sources.items():  # the one that wins first
        for name, value in source().items():
            found.setdefault(name, label)
            for key in value if isinstance(value, dict) else ():
                found.setdefault(key, label)
    for name, variable in VARIABLES.items():  # what `store` leaves to the variable, or to the default
        if store.get(name) is None:
            found.pop(name, None)
            if os.environ.get(variable, "").strip():
                found[name] = f"environment variable {variable}"
    return found


def _environment_over_file(
    kwargs: dict[str, Any], sources: dict[str, PydanticBaseSettingsSource], yaml_name: str
) -> dict[str, Any]:
    """Leave out what only the file says of the store and a MOONCAKE_... variable says too: the environment comes first.

    The variable is not copied into the settings, since each node may have its own.
    """
    given = {label: set(source().get(_STORE) or {}) for label, source in sources.items()}
    only_in_file = given.pop(yaml_name).difference(*given.values())
    overridden = {name for name in only_in_file if os.environ.get(VARIABLES.get(name, ""), "").strip()}
    return {name: value for name, value in kwargs.items() if name not in overridden}


def _explain(error: Any, sources: dict[str, PydanticBaseSettingsSource]) -> str:
    name = str(error["loc"][0])
    origin = next((label for label, source in sources.items() if name in source()), "the defaults")
    if error["type"] == "extra_forbidden":
        return f"unknown setting {name!r} in {origin}{_nearest(name, TrainConfig.model_fields)}"
    path = ".".join(map(str, error["loc"]))
    value = error["input"]
    shown = value if isinstance(value, datetime.date) else repr(value)
    context = error.get("ctx", {})
    allowed = _ALLOWED.get(error["type"])
    problem = allowed.format_map(context) if allowed else context.get("error", error["msg"])
    return f"{path}={shown} from {origin}: {problem}"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open() as file:
            content = yaml.load(file, _Loader)
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror}; give the path of a YAML file, e.g. configs/local.yaml"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected a mapping of settings, found {type(content).__name__}")
    for name in content:
        if not isinstance(name, str):
            raise ConfigError(f"--config {path}: the key {name!r} is a {type(name).__name__}; settings have names")
    return content
