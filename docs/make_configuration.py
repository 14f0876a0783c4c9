"""docs/configuration.md, made from the settings' own classes: `python -m docs.make_configuration`, from the root."""

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miles_plugin.arguments import ENV_PREFIX, GROUPS
from miles_plugin.cli import COMMANDS, PROG
from mooncake_store.client import ENVIRONMENT
from mooncake_store.config import _FIELDS, MASTER_VARIABLE, MISTAKEN_MASTER_VARIABLE, MooncakeConfig, parse_size

COMMAND = ".venv/bin/python -m docs.make_configuration"
PAGE = Path(__file__).with_name("configuration.md")

_TYPES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true, false",
    Path: "path",
    list[str]: "one or more texts",
}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

_PAGE = """<!-- Made from the code. Do not edit; run: {command} -->

# Configuration

What `{prog} train --help` says, in one table per group, then the settings of Mooncake, the other commands and
the exit statuses. [quickstart.md](quickstart.md) shows the settings at work, [troubleshooting.md](troubleshooting.md)
what happens when they are wrong. The names are miles's wherever miles has the setting.

## Where a setting comes from

A setting has one name in three spellings: the flag `--num-rollout`, the key `num_rollout` of the YAML file that
`--config` names, and the environment variable `{prefix}NUM_ROLLOUT`.

1. A flag wins over the environment, the environment over the file, the file over the default. An empty variable counts
   as not set.
2. A setting that holds a mapping (type "JSON object") is merged key by key in that order: a flag that gives one key
   leaves the other keys of the file in place. JSON on the command line and in the environment, a mapping in YAML.
3. A setting that takes several values has them all after one flag, or the flag repeated; in the environment separated
   by spaces or commas; in YAML a list. The one that wins replaces the others' values.
4. Each of Mooncake's own settings comes from `mooncake_store_init_kwargs` as a flag or in the environment, else from
   its own variable (`{master}`, ...) where the process runs, else from `mooncake_store_init_kwargs` in the file, else
   from the default. A value of `null` and an empty variable count as not set; a 0 does not.
5. A name that does not exist is an error in each of these places, and so is a variable `{prefix}...` that no setting
   reads. The message names the nearest one that exists.
6. Sizes are a whole number of bytes, or text such as `512mb` or `1.5gb`: k, m and g are powers of 1024.
7. `--dry-run` checks everything and shows where each of Mooncake's settings came from. `config.yaml` in the report
   holds the settings as resolved, and `--config` reads it back.

## `{prog} train`

`--config FILE` names the YAML file. Beside it:

{train}

## Mooncake's settings

Keys of `mooncake_store_init_kwargs`, and of `init_kwargs` in `mooncake_store.open_store("mooncake", init_kwargs=...)`.
A job without `master_server_address` and without
`{master}` starts a `mooncake_master` of its own on 127.0.0.1 and stops it at the end; `open_store` needs one of them.
What the store holds lies in the memory of segment holders, processes of which one per node is enough: a job starts one
for its machine unless one serves it already, so does a process that calls `open_store`, and so does `{prog} holder`.

{mooncake}

`{mistaken}` is read by nobody: a job or a store that finds it set, and no address elsewhere, is refused.

Without an RDMA device say `"protocol": "tcp"`: the default is miles's, `rdma`, and a host that cannot do it is refused.

## Other variables

{environment}

Those of Mooncake bound how long a master that is wrong or dead holds a process, and keep its chatter off the terminal.

## Other commands

{commands}

`{prog} --version` prints the version.

## Exit status

{statuses}

A refused or failed job prints one line `{prog}: KIND: message` to standard error, which a log's last lines may follow.
"""

_STATUSES = {
    "0": "done, also when `--load` finds all rollouts done and nothing is started; a segment holder that SIGTERM ended",
    "1": "a part of the job failed; the message names the part, its log and the log's last lines. Also when the reader "
    "of the output, such as `head`, has gone, or the output cannot be written",
    "2": "wrong use, a wrong setting, or a store that does not answer; nearly all of these are found before anything "
    "starts",
    "130": "Ctrl-C or SIGTERM; what the job started has been stopped",
    "137": "SIGKILL; what the job started ends with it, Ray's own small agents within about a minute",
}

_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "which GPUs the job sees; empty runs it on the CPU",
    "LOCAL_RANK": "of a process that calls `open_store`: 0 or not set, it starts a segment holder where none serves "
    "its node; else it does not, unless `contribute_segment` says so. A job sets it for its ranks",
    "RAY_USAGE_STATS_ENABLED": "set to 0 by a job, unless you have set it: Ray sends nothing",
    "WANDB_API_KEY": "needed by `--wandb-mode online`, unless `wandb login` was run",
}


def page() -> str:
    """The text of docs/configuration.md."""
    return _PAGE.format(
        command=COMMAND,
        prog=PROG,
        prefix=ENV_PREFIX,
        master=MASTER_VARIABLE,
        mistaken=MISTAKEN_MASTER_VARIABLE,
        train="\n\n".join(_group(group) for group in GROUPS),
        mooncake=_mooncake(),
        environment=_environment(),
        statuses=_table(("status", ""), _STATUSES.items()),
        commands="\n\n".join(
            section for name, command in COMMANDS.items() if name != "train" for section in _command(command.parser())
        ),
    )


def _group(group: type[BaseModel]) -> str:
    title, summary = (group.__doc__ or "").split(": ", 1)
    rows = [
        (_spellings(name, field), _values(field), _default(field), _text(field.description or ""))
        for name, field in group.model_fields.items()
    ]
    table = _table(("flag, key, variable", "values", "default", ""), rows)
    return f"### {title}\n\n{_text(summary[0].upper() + summary[1:])}.\n\n{table}"


def _spellings(name: str, field: FieldInfo) -> str:
    flag = f"--{name.replace('_', '-')}"
    negated = f", `{flag.replace('--', '--no-', 1)}`" if field.annotation is bool else ""
    return f"`{flag}`{negated}<br>`{name}`<br>`{ENV_PREFIX}{name.upper()}`"


def _values(field: FieldInfo) -> str:
    (kind,) = [kind for kind in _alternatives(field.annotation) if kind is not type(None)]
    kind, constraints = _without_annotations(kind)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is dict:
        return "JSON object"
    constraints = [*constraints, *field.metadata]
    bounds = [
        f"{sign} {_number(value)}"
        for constraint in constraints
        for name, sign in _BOUNDS.items()
        if (value := getattr(constraint, name, None)) is not None
    ]
    patterns = [f"`{constraint.pattern}`" for constraint in constraints if getattr(constraint, "pattern", None)]
    return ", ".join(["size in bytes" if _is_size(field) else _TYPES[kind], *bounds, *patterns])


def _alternatives(annotation: Any) -> Sequence[Any]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]


def _without_annotations(kind: Any) -> tuple[Any, Sequence[Any]]:
    if get_origin(kind) is not Annotated:
        return kind, []
    inner, *constraints = get_args(kind)
    return inner, constraints


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    assert value is not PydanticUndefined, "every setting has a default"
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value >> 20}mb`" if _is_size(field) else f"`{_number(value)}`"


def _is_size(field: FieldInfo) -> bool:
    return any(getattr(constraint, "func", None) is parse_size for constraint in field.metadata)


def _number(value: object) -> str:
    return "2³¹" if value == 2**31 else str(value)


def _mooncake() -> str:
    meanings = _attributes(MooncakeConfig)
    rows = []
    for name, field in _FIELDS.items():
        variable = f"`{field.variable}`" if field.variable else "none"
        default = "not set" if field.default is None else f"`{field.default}`" if field.default != "" else "empty"
        rows.append((f"`{name}`", variable, default, _text(meanings[name])))
    return _table(("key", "variable", "default", ""), rows)


def _attributes(documented: type) -> dict[str, str]:
    """Name -> text of the section "Attributes" of a class's docstring."""
    section = (documented.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _environment() -> str:
    rows = [(f"`{name}`", meaning) for name, meaning in _VARIABLES.items()]
    rows += [
        (f"`{name}`", f"of Mooncake; set to `{value}` unless you have set it") for name, value in ENVIRONMENT.items()
    ]
    return _table(("variable", ""), sorted(rows))


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A section per parser, those of a command's own commands after it."""
    actions = [action for action in parser._actions if action.dest != "help"]
    rows = [(_argument(action), _text(f"{action.help}{_choices(action)}")) for action in actions]
    yield f"### `{parser.prog}`\n\n{parser.description}\n\n{_table(('argument', ''), rows)}"
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _command(below)


def _argument(action: argparse.Action) -> str:
    return f"`{', '.join(action.option_strings) or action.metavar or action.dest.upper()}`"


def _choices(action: argparse.Action) -> str:
    return f": {', '.join(action.choices)}" if action.choices else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _text(text: str) -> str:
    """As Markdown: names of settings as code, and nothing that a table or HTML would swallow."""
    parts = re.split(r"(`[^`]*`|--[a-z][a-z-]*[a-z]|\b[a-z]+(?:_[a-z]+)+\b|\w+(?:\.\w+){2,})", text)
    for index, part in enumerate(parts):
        if index % 2 == 0:
            parts[index] = part.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
        elif not part.startswith("`"):
            parts[index] = f"`{part}`"
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
