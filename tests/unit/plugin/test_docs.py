"""The documents agree with the code: the generated page, and every flag, link, program, variable and module named."""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import make_configuration
from examples.two_node_fsdp import launch
from miles_plugin.arguments import ENV_PREFIX, TrainConfig
from miles_plugin.cli import COMMANDS, _top_parser

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
PACKAGES = ("mooncake_store", "miles_plugin", "benchmarks", "examples", "docs")
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

# Flags that are not ours: whose they are, or why they are shown.
OTHERS = {
    "--num-rolout": "a mistake, to show what it is told",
    "--reward-key": "miles, not supported",
    "--group-rm": "miles, not supported",
    "--delay-split-train-data-by-dp": "miles",
    "--custom-update-weight-post-write-path": "miles",
    "--indep-dp": "miles",
    "--dynamic-sampling-filter-path": "miles",
    **dict.fromkeys(
        (
            "--model-path",
            "--dtype",
            "--host",
            "--port",
            "--tp-size",
            "--json-model-override-args",
            "--device",
            "--engine-info-bootstrap-port",
            "--dist-init-addr",
        ),
        "SGLang",
    ),
    "--enable-return-routed-experts": "SGLang",
    "--remote-instance-weight-loader-start-seed-via-transfer-engine": "SGLang",
    "--address": "ray job submit",
    "--runtime-env-json": "ray job submit",
    "--no-deps": "pip",
    "--block": "ray start",
    "--resources": "ray start",
    "--rpc_port": "mooncake_master",
    "--metrics_port": "mooncake_master",
    "--rpc_address": "mooncake_master",
    "--metrics_host": "mooncake_master",
    "--soak-seconds": "pytest, in this repository",
    "--logdir": "tensorboard",
    "--shm-size": "docker",
    "--plasma_directory": "Ray",
}


def flags() -> set[str]:
    parsers = [_top_parser(), *(command.parser() for command in COMMANDS.values()), launch._parser()]
    return {flag for parser in parsers for action in actions(parser) for flag in action.option_strings}


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a parser and of those below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in set(action.choices.values()):
                yield from actions(below)


def anchors(document: Path) -> set[str]:
    """What a heading is called in a link, as GitHub does it."""
    without_code = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def links(document: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" not in target:
            yield target


def test_the_configuration_page_is_up_to_date() -> None:
    assert make_configuration.PAGE.read_text() == make_configuration.page(), f"run {make_configuration.COMMAND}"


@each_document
def test_flags_exist(document: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", document.read_text()))
    assert not named - flags() - OTHERS.keys()


def test_no_exception_is_left_over() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert not [flag for flag in OTHERS if flag not in text]


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in links(document):
        path, _, anchor = target.partition("#")
        found = document.parent / path if path else document
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@each_document
def test_programs_and_make_targets_exist(document: Path) -> None:
    text = document.read_text()
    for program in re.findall(r"\.venv/bin/([\w.-]+)", text):
        assert (Path(sys.executable).parent / program).exists(), program
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE)) - targets


@each_document
def test_variables_exist(document: Path) -> None:
    named = set(re.findall(rf"{ENV_PREFIX}([A-Z][A-Z0-9_]*)(?![A-Z0-9_.])", document.read_text()))
    assert not named - {name.upper() for name in TrainConfig.model_fields} - {"NUM_ROLOUT"}  # the mistake again


@each_document
def test_modules_exist(document: Path) -> None:
    known = {path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not set(re.findall(r"`(?:\w+/)*(\w+\.py)`", document.read_text())) - known


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    modules = [path for package in PACKAGES[:2] for path in (ROOT / package).rglob("*.py")]
    assert not [str(path.relative_to(ROOT)) for path in modules if path.stem != "__init__" and path.name not in text]
