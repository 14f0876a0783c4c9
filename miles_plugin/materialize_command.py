"""`miles-mooncake materialize`: a checkpoint on this host, kept at the newest published version of weights."""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from miles_plugin.report.units import nbytes, seconds
from mooncake_store.addresses import endpoint
from mooncake_store.errors import ConfigError, IntegrityError, ObjectNotFound, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from miles_plugin.weight_transfer.disk_delta.materialize import Materializer

_PROG = "miles-mooncake materialize"
_PRE_READ = "--custom-update-weight-pre-read-path"
_POLL_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0


def materialize_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Bring a checkpoint on this host to a version of weights that a job has published "
        "(--update-weight-transfer-mode disk-delta). Every tensor is checked before LOCAL/current shows the version; "
        "what was shown before stays whole until then, whatever happens.",
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--source", required=True, metavar="DIR|URL", help="the job's --update-weight-disk-dir (no default)"
    )
    where.add_argument("--base", required=True, type=Path, metavar="DIR", help="the job's --hf-checkpoint (no default)")
    where.add_argument(
        "--local",
        required=True,
        type=Path,
        metavar="DIR",
        help="gets two copies of the checkpoint, and `current` (no default)",
    )
    where.add_argument(
        _PRE_READ,
        dest="pre_read",
        metavar="MODULE.FUNCTION",
        help="of yours, called as function(args, version_dir) before a version is read, args being these arguments, "
        "e.g. to refresh what a network file system shows (default: none)",
    )
    what = parser.add_argument_group("what")
    which = what.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="bring this version (default: the newest)")
    which.add_argument(
        "--follow", action="store_true", help="bring every new version, until Ctrl-C (default: one, and end)"
    )
    which.add_argument(
        "--verify",
        action="store_true",
        help="bring nothing: read what is there again and compare checksums (default: bring)",
    )
    what.add_argument(
        "--engine", dest="engines", action="append", default=[], metavar="HOST:PORT",
        help="an engine that loads LOCAL/current, as the job names it; may be given again (default: none)",
    )  # fmt: skip
    what.add_argument(
        "--load",
        action="store_true",
        help="have the engines load each version here, for a job that does not (default: it does)",
    )
    what.add_argument(
        "--reader",
        default=socket.gethostname(),
        metavar="ID",
        help="this host's name among readers (default: its host name)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line (default: text)")
    return parser


def run_materialize(argv: Sequence[str]) -> None:
    """Do what the arguments say.

    Raises:
        ConfigError, IntegrityError, ObjectNotFound, StoreUnavailable: as `Materializer` does.
        EngineError: an engine did not load the version.
    """
    from miles_plugin.weight_transfer.disk_delta.materialize import Materializer
    from miles_plugin.weight_transfer.disk_delta.readers import check_reader_id
    from miles_plugin.weight_transfer.disk_delta.storage import open_storage

    arguments = materialize_parser().parse_args(argv)
    for engine in arguments.engines:
        endpoint(engine)
    check_reader_id(arguments.reader)
    if arguments.load and not arguments.engines:
        raise ConfigError("--load: no engine is named; add --engine host:port")
    storage = open_storage(arguments.source, make=False)
    pre_read = _pre_read(arguments)  # found, or refused, before anything is read
    host = _Host(Materializer(storage, arguments.local, arguments.base, pre_read=pre_read), arguments)
    if arguments.verify:
        host.verify()
    elif arguments.follow:
        host.follow()
    else:
        host.bring(arguments.version)


class _Host:
    """This host, and what it was told to do."""

    def __init__(self, materializer: Materializer, arguments: argparse.Namespace) -> None:
        self._materializer, self._arguments = materializer, arguments
        self._loaded: dict[str, tuple[int, Path]] = {}  # by engine

    def bring(self, version: int | None) -> None:
        made = self._materializer.bring_to(version, forward=True)
        self._materializer.report(self._arguments.reader, self._arguments.engines)
        if self._arguments.load:
            self._load(made.version, made.path)
        self._say(
            f"version {made.version} in {made.path}: {nbytes(made.bytes_read)} read, "
            f"{', '.join(f'{phase} {seconds(took)}' for phase, took in made.seconds.items() if took)}"
            + "".join(f"\n  note: {note}" for note in made.notes),
            version=made.version,
            path=str(made.path),
            bytes_read=made.bytes_read,
            seconds=made.seconds,
            notes=made.notes,
        )

    def follow(self) -> None:
        """Bring every new version. What cannot be brought is reported, and tried again: at once when there is a newer
        one, else less and less often."""
        from miles_plugin.engines.sglang import EngineError

        seen: int | None = -1
        tried, problem, pause, retry_at = seen, "", _POLL_SECONDS, 0.0
        while True:
            try:
                newest = self._materializer.newest()
                if newest != tried:
                    pause, retry_at = _POLL_SECONDS, 0.0
                if (newest != seen or problem) and time.monotonic() >= retry_at:
                    tried = newest
                    self.bring(None)
                    seen, problem, pause = newest, "", _POLL_SECONDS
            except (EngineError, IntegrityError, ObjectNotFound, StoreUnavailable) as error:
                retry_at, pause = time.monotonic() + pause, min(2 * pause, _LONGEST_PAUSE_SECONDS)
                if str(error) != problem:
                    problem = str(error)
                    self._say(f"problem: {error}", problem=problem)
                    if self._materializer.exposed() is not None:
                        with suppress(StoreError):  # the place itself may be the problem
                            self._materializer.report(self._arguments.reader, self._arguments.engines, problem)
            time.sleep(_POLL_SECONDS)

    def verify(self) -> None:
        damaged = self._materializer.verify()
        there = self._materializer.exposed()
        if there is None:
            raise ConfigError(f"{self._arguments.local} has no version yet; run {_PROG} without --verify")
        if damaged:
            raise IntegrityError(
                f"{there[1]}: {len(damaged)} tensors are not as they were written: {', '.join(damaged[:3])}; run "
                f"{_PROG} without --verify, which makes the version anew"
            )
        self._say(
            f"version {there[0]} in {there[1]}: every tensor as it was written", version=there[0], path=str(there[1])
        )

    def _load(self, version: int, path: Path) -> None:
        """Let all engines load it that have not; those that fail stay paused, and do not keep the others from it."""
        from miles_plugin.engines.sglang import EngineError

        failed = []
        for address in self._arguments.engines:
            if self._loaded.get(address) == (version, path):
                continue
            self._loaded.pop(address, None)
            try:
                _load(address, version, path)
                self._loaded[address] = version, path
            except EngineError as error:
                failed.append(str(error))
        if failed:
            raise EngineError(f"version {version} is not loaded by {len(failed)} engines: {'; '.join(failed)}")

    def _say(self, text: str, **facts: object) -> None:
        print(json.dumps(facts) if self._arguments.json else text, flush=True)


def _pre_read(arguments: argparse.Namespace) -> Callable[[int], None] | None:
    from miles_plugin.rollout.functions import CustomFunctionError
    from miles_plugin.weight_transfer.disk_delta.opened import READS, version_hook

    if arguments.pre_read is None:
        return None
    hook = version_hook(_PRE_READ, arguments.pre_read, READS, arguments, arguments.source)

    def call(version: int) -> None:
        try:
            hook(version)
        except CustomFunctionError as error:  # the place is not ready: with --follow it is tried again
            raise StoreUnavailable(str(error)) from error

    return call


def _load(address: str, version: int, path: Path) -> None:
    from miles_plugin.engines.sglang import SGLangEngine
    from miles_plugin.weight_transfer.disk_delta.transport import LOAD_SECONDS

    engine = SGLangEngine(f"http://{address}")
    try:
        engine.pause("retract")
        engine.flush_cache()
        engine.load_checkpoint(str(path), LOAD_SECONDS, version)
        engine.resume()
    finally:
        engine.close()
