"""`miles-mooncake COMMAND ...`.

Exit status: 0 success, also when nothing was left to do; 1 a part failed; 2 wrong use, a wrong setting, or a store that
does not answer; 130 Ctrl-C.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import shtab

from miles_plugin import bench_commands, materialize_command, simulate_command, store_commands
from miles_plugin.arguments_sources import load_config_and_origins, settings_parser, with_origins
from mooncake_store.errors import ConfigError, StoreError

PROG = "miles-mooncake"


@dataclass(frozen=True)
class Command:
    """parser: of its flags, for help and completion. run: does it, given the arguments after the command's name."""

    summary: str
    parser: Callable[[], argparse.ArgumentParser]
    run: Callable[[Sequence[str]], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status. Signals are the caller's: see `__main__.py`."""
    try:
        return _run(argv)
    finally:
        _print("", end="")  # what argparse has printed


def _print(text: str, end: str = "\n") -> None:
    """Print and write it out, or exit with status 1: at the interpreter's end a failure would be a traceback."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would try again
        if not isinstance(error, BrokenPipeError):  # e.g. `| head`
            print(f"{PROG}: standard output: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def _run(argv: Sequence[str] | None) -> int:
    arguments, rest = _top_parser().parse_known_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    from miles_plugin.checkpoint import AlreadyDone
    from miles_plugin.engines.sglang import EngineError
    from miles_plugin.job import JobFailed

    try:
        COMMANDS[arguments.command].run(rest)
    except AlreadyDone as done:
        print(f"{PROG}: {done}", file=sys.stderr)
    except StoreError as error:
        return _fail(error, 2)
    except (JobFailed, bench_commands.BenchFailed, EngineError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; everything it started has been stopped", file=sys.stderr)
        return 130
    return 0


def full_parser() -> argparse.ArgumentParser:
    """Every command with all its flags, for completion."""
    top = argparse.ArgumentParser(prog=PROG, description="RL post-training over Mooncake Store.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        parser = commands.add_parser(name, parents=[command.parser()], add_help=False, help=command.summary)
        for action in parser._actions:
            if isinstance(action.metavar, str) and action.metavar.startswith("{"):
                # The settings check their values themselves, with better messages than argparse has.
                action.choices = [value for value in action.metavar.strip("{}").split(",") if value != "null"]
    return top


def _top_parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=PROG,
        description="RL post-training over Mooncake Store.",
        epilog=f"`{PROG} COMMAND --help` lists a command's flags and their defaults.",
    )
    top.add_argument("--version", action="version", version=f"{PROG} {version(PROG)}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    return top


def _train(argv: Sequence[str]) -> None:
    from miles_plugin.job import train
    from miles_plugin.plan import describe
    from miles_plugin.preflight import check

    config, origins = load_config_and_origins(argv)
    try:
        if config.dry_run:
            with redirect_stdout(sys.stderr):  # a user's module may print when it is imported
                plan = check(config)
            _print(describe(config, plan, origins))
        else:
            train(config, origins)
    except ConfigError as error:
        raise type(error)(with_origins(str(error), origins)) from error


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROG} report", description="Draw report.png and report.html anew from report.json."
    )
    directory = parser.add_argument("directory", type=Path, metavar="DIR", help="a report's, e.g. runs/<run id>")
    directory.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # where shtab looks for it
    return parser


def _report(argv: Sequence[str]) -> None:
    from miles_plugin.report.files import redraw

    for path in redraw(_report_parser().parse_args(argv).directory):
        _print(str(path))


def _add_engine_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROG} add-engine",
        description="Ask a running job to take in SGLang servers. It checks each before its next rollout and brings it "
        "the newest weights before its first request; its output says so, or why not.",
    )
    directory = parser.add_argument("directory", type=Path, metavar="DIR", help="of its report, e.g. runs/<run id>")
    directory.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    parser.add_argument("addresses", nargs="+", metavar="HOST:PORT", help="of each engine, IPv6 in brackets")
    return parser


def _add_engine(argv: Sequence[str]) -> None:
    from miles_plugin.engines.joining import ask_to_join

    arguments = _add_engine_parser().parse_args(argv)
    ask_to_join(arguments.directory, arguments.addresses)
    _print(f"asked: {', '.join(arguments.addresses)}; the job looks before its next rollout")


def _completion_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROG} completion",
        description="Print the script that completes commands and flags on TAB.",
        epilog=f'bash: eval "$({PROG} completion bash)" in ~/.bashrc; zsh: {PROG} completion zsh > '
        '"${fpath[1]}/_miles-mooncake"',
    )
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="which shell")
    return parser


def _completion(argv: Sequence[str]) -> None:
    _print(shtab.complete(full_parser(), _completion_parser().parse_args(argv).shell))


COMMANDS = {
    "train": Command("run the main job: rollout, training and weight updates", lambda: settings_parser()[0], _train),
    "add-engine": Command("give a running job more engines", _add_engine_parser, _add_engine),
    "materialize": Command(
        "keep a checkpoint at the newest published weights",
        materialize_command.materialize_parser,
        materialize_command.run_materialize,
    ),
    "holder": Command("lend this node's memory to a store", store_commands.holder_parser, store_commands.run_holder),
    "ls": Command("list what a store holds", store_commands.ls_parser, store_commands.run_ls),
    "sweep": Command("free what dead runs left", store_commands.sweep_parser, store_commands.run_sweep),
    "report": Command("draw a report's pictures anew", _report_parser, _report),
    "bench": Command("measure this machine", bench_commands.bench_parser, bench_commands.run_bench),
    "simulate": Command(
        "predict what a cluster would do", simulate_command.simulate_parser, simulate_command.run_simulate
    ),
    "completion": Command("print a shell's completion script", _completion_parser, _completion),
}


def _fail(error: Exception, status: int) -> int:
    print(f"{PROG}: {type(error).__name__}: {error}", file=sys.stderr)
    return status
