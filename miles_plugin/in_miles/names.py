"""Every name of miles that this package touches or relies on, and how they are recognised without importing miles.

Read at radixark/miles 31f1ca961 (2026-08-21). `miles/utils/object_store.py` is there since 01df799d4 (2026-07-27).
"""

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from mooncake_store.errors import ConfigError

KNOWN_REVISIONS = "radixark/miles 01df799d4 (2026-07-27) to 31f1ca961 (2026-08-21)"

OBJECT_STORE = "miles.utils.object_store"
DATA = "miles.utils.data"
CONVERSION = "miles.ray.rollout.train_data_conversion"

# Replaced: the class in OBJECT_STORE, and in DATA the function that gives a trainer rank its rows.
STORE_CLASS = "MooncakeObjectStore"
INSTANCE = "_INSTANCE"  # of OBJECT_STORE; looked at only
SHARD_FUNCTION = "process_rollout_data"
# Modules that import SHARD_FUNCTION by name.
IMPORTERS = ("miles.backends.training_utils.data",)

# Rows of log-probabilities, which context parallelism cuts with torch.cat: they must be tensors, or lists.
LOG_PROBS = frozenset({"rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"})


@dataclass(frozen=True)
class Expected:
    """A function or method of miles by its qualified name, with the names of its parameters in order."""

    module: str
    name: str
    parameters: tuple[str, ...]


EXPECTED = (
    Expected(OBJECT_STORE, "init_instance", ("args", "contribute_segment")),
    Expected(OBJECT_STORE, "get_instance", ()),
    Expected(OBJECT_STORE, "_create_instance", ("args", "contribute_segment")),
    Expected(OBJECT_STORE, "ObjectStoreGetResult.__init__", ("self", "value", "release_fn")),
    Expected(OBJECT_STORE, "BaseObjectStore.put", ("self", "value", "value_spec")),
    Expected(OBJECT_STORE, "BaseObjectStore.get", ("self", "ref")),
    Expected(OBJECT_STORE, "BaseObjectStore.remove", ("self", "ref")),
    Expected(OBJECT_STORE, f"{STORE_CLASS}.__init__", ("self", "args", "contribute_segment")),
    Expected(OBJECT_STORE, f"{STORE_CLASS}.put", ("self", "value", "value_spec")),
    Expected(OBJECT_STORE, f"{STORE_CLASS}.get", ("self", "ref")),
    Expected(OBJECT_STORE, f"{STORE_CLASS}.remove", ("self", "ref")),
    Expected(DATA, SHARD_FUNCTION, ("args", "rollout_data_ref", "dp_rank", "dp_size", "witness_info")),
    Expected(CONVERSION, "split_train_data_by_dp_raw", ("args", "data", "dp_size")),
    Expected(CONVERSION, "process_rollout_data_shard", ("args", "rollout_data")),
)


def is_importable() -> bool:
    """Whether this process can import miles."""
    return importlib.util.find_spec("miles") is not None


def check() -> None:
    """Compare the source of the miles that would be imported with EXPECTED, without importing its modules.

    Raises:
        ConfigError: a name is missing or takes other parameters; says which, and which revisions are known.
    """
    for module in dict.fromkeys(expected.module for expected in EXPECTED):
        source = _source(module)
        found = _functions(ast.parse(source.read_text()))
        for expected in EXPECTED:
            if expected.module == module and found.get(expected.name) != expected.parameters:
                raise _unknown(f"{module}.{expected.name}{_signature(expected.parameters)}", source, found, expected)


def _source(module: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError as error:
        spec, reason = None, str(error)
    else:
        reason = "there is no such module"
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"this is not a miles that miles-mooncake knows: looked for {module}, but {reason}; known are "
            f"{KNOWN_REVISIONS}"
        )
    return Path(spec.origin)


def _functions(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Parameters of the module's functions and of its classes' methods, by qualified name."""
    found = {}
    for node in tree.body:
        owner, body = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        for each in body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = each.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                found[owner + each.name] = tuple(argument.arg for argument in every)
    return found


def _unknown(looked_for: str, source: Path, found: dict[str, tuple[str, ...]], expected: Expected) -> ConfigError:
    there = found.get(expected.name)
    what = "nothing of that name" if there is None else f"{expected.name}{_signature(there)}"
    return ConfigError(
        f"this is not a miles that miles-mooncake knows: looked for {looked_for} in {source}, found {what}; known are "
        f"{KNOWN_REVISIONS}. Nothing was changed: use such a revision, or a miles-mooncake that knows yours"
    )


def _signature(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})"
