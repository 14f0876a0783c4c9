"""Every name of miles that this package touches or relies on, and how they are recognised without importing miles.

Read at radixark/miles 31f1ca961 (2026-08-21). `miles/utils/object_store.py` is there since 01df799d4 (2026-07-27).
"""

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mooncake_store.errors import ConfigError

KNOWN_REVISIONS = "radixark/miles 01df799d4 (2026-07-27) to 31f1ca961 (2026-08-21)"
BUFFER_REVISIONS = "radixark/miles eff558e9b (2026-08-07) to 31f1ca961 (2026-08-21)"

OBJECT_STORE = "miles.utils.object_store"
DATA = "miles.utils.data"
CONVERSION = "miles.ray.rollout.train_data_conversion"
RAY_UTILS = "miles.utils.ray_utils"
BUFFER = "miles.rollout.fully_async_data_buffer"
FILTERS = "miles.rollout.filter_hub.base_types"
MISC = "miles.utils.misc"

# Replaced: the class in OBJECT_STORE, and in DATA the function that gives a trainer rank its rows.
STORE_CLASS = "MooncakeObjectStore"
INSTANCE, REF, FACTORY = "_INSTANCE", "StoreObjectRef", "_create_instance"  # of OBJECT_STORE; looked at only
SHARD_FUNCTION = "process_rollout_data"
# Modules that import SHARD_FUNCTION by name.
IMPORTERS = ("miles.backends.training_utils.data",)

# Rows that the trainer makes tensors of by torch.tensor.
MADE_TENSORS = frozenset({"tokens", "loss_masks"})
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
    Expected(OBJECT_STORE, FACTORY, ("args", "contribute_segment")),
    Expected(OBJECT_STORE, "ObjectStoreGetResult.value", ("self",)),
    Expected(RAY_UTILS, "Box.__init__", ("self", "inner")),
    Expected(RAY_UTILS, "Box.inner", ("self",)),
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

# Of the buffer of asynchronous rollouts, which a miles that has none need not have; `get` takes more, by name.
EXPECTED_BUFFER = (
    Expected(BUFFER, "DataBufferConstructorInput.__init__", ("self", "args", "unused_handler_fn")),
    Expected(BUFFER, "DataBufferInput.__init__", ("self", "prompt_group", "group")),
    Expected(BUFFER, "DataBuffer.put", ("self", "input")),
    Expected(BUFFER, "DataBuffer.get", ("self",)),
    Expected(BUFFER, "DataBuffer.get_metrics", ("self",)),
    Expected(FILTERS, "call_dynamic_filter", ("fn",)),
    Expected(FILTERS, "MetricGatherer.__init__", ("self",)),
    Expected(FILTERS, "MetricGatherer.on_dynamic_filter_drop", ("self", "reason")),
    Expected(FILTERS, "MetricGatherer.collect", ("self",)),
    Expected(MISC, "load_function", ("path", "sync_required")),
)


def is_importable() -> bool:
    """Whether this process can import miles."""
    try:
        return importlib.util.find_spec("miles") is not None
    except ValueError:  # there is something of that name that was not imported
        return True


def check() -> None:
    """Compare the source of the miles that would be imported with what is relied on, without importing its modules.

    Raises:
        ConfigError: something is missing or different; says what was looked for and found, and which revisions are
            known.
    """
    _check_signatures(EXPECTED, KNOWN_REVISIONS)
    _check_store(_source(OBJECT_STORE))
    for importer in IMPORTERS:
        _check_importer(_source(importer))


def check_buffer() -> None:
    """The same of what the buffer of asynchronous rollouts relies on. Raises ConfigError, as `check`."""
    _check_signatures(EXPECTED_BUFFER, BUFFER_REVISIONS)


def _check_signatures(names: Sequence[Expected], known: str) -> None:
    for module in dict.fromkeys(expected.module for expected in names):
        source = _source(module, known)
        found = _functions(_parsed(source))
        for expected in names:
            if expected.module == module and found.get(expected.name) != expected.parameters:
                there = found.get(expected.name)
                raise _unknown(
                    f"{module}.{expected.name}{_signature(expected.parameters)}",
                    source,
                    "nothing of that name" if there is None else f"{expected.name}{_signature(there)}",
                    known,
                )


def _check_store(source: Path) -> None:
    """What is more than a signature: names of the module, and who makes the store."""
    tree = _parsed(source)
    assigned = {
        target.id
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        if isinstance(target, ast.Name)
    }
    for name in (INSTANCE, REF):
        if name not in assigned:
            raise _unknown(f"{OBJECT_STORE}.{name}", source, "nothing of that name")
    bodies = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    made = {
        node.func.id
        for node in ast.walk(bodies[FACTORY])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    if STORE_CLASS not in made:
        raise _unknown(f"{FACTORY} to make a {STORE_CLASS}", source, f"calls of {', '.join(sorted(made))}")
    abstract = {
        node.name
        for node in ast.walk(bodies["BaseObjectStore"])
        if isinstance(node, ast.FunctionDef) and any("abstractmethod" in ast.dump(mark) for mark in node.decorator_list)
    }
    if not abstract <= {"put", "get", "remove"}:
        raise _unknown("BaseObjectStore with put, get and remove", source, f"{', '.join(sorted(abstract))}")


def _check_importer(source: Path) -> None:
    imported = [
        name
        for node in ast.walk(_parsed(source))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name == SHARD_FUNCTION
    ]
    if [name.asname for name in imported] != [None]:
        raise _unknown(
            f"an import of {SHARD_FUNCTION} under its name", source, f"{[ast.unparse(each) for each in imported]}"
        )


def _parsed(source: Path) -> ast.Module:
    try:
        return ast.parse(source.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not a miles that miles-mooncake knows: {source}: {error}") from error


def _source(module: str, known: str = KNOWN_REVISIONS) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        spec, reason = None, str(error)
    else:
        reason = "there is no such module"
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"this is not a miles that miles-mooncake knows: looked for {module}, but {reason}; known are "
            f"{known}. Nothing was changed"
        )
    return Path(spec.origin)


def _functions(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Parameters of the module's functions and of its classes' methods, by qualified name.

    Of a class without __init__, the fields that its dataclass makes parameters of.
    """
    found = {}
    for node in tree.body:
        owner, body = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        fields = [
            each.target.id for each in body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        if owner and fields:
            found[f"{owner}__init__"] = ("self", *fields)
        for each in body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = each.args
                every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                found[owner + each.name] = tuple(argument.arg for argument in every)
    return found


def _unknown(looked_for: str, source: Path, found: str, known: str = KNOWN_REVISIONS) -> ConfigError:
    return ConfigError(
        f"this is not a miles that miles-mooncake knows: looked for {looked_for} in {source}, found {found}; known are "
        f"{known}. Nothing was changed: use such a revision, or a miles-mooncake that knows yours"
    )


def _signature(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})"
