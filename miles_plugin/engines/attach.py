"""SGLang servers that run already: each reached within seconds, and checked to be what the job trains.

A server that joins a weight update with another shape, dtype or number of ranks would fail it, or hang it, or, worse,
serve another policy. So whatever differs is found before the job starts anything, and of all servers at once.
"""

import ipaddress
import json
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from miles_plugin.arguments import TrainConfig
from miles_plugin.engines.differences import SEED_FLAG, Answers, Expected, differences, model_config
from miles_plugin.engines.http import EngineTimeout
from miles_plugin.engines.sglang import EngineError, SGLangEngine
from mooncake_store.addresses import endpoint
from mooncake_store.bounded import bounded
from mooncake_store.errors import ConfigError

# Seconds that one server may take for all that it is asked. It answers beside what it generates.
ANSWER_SECONDS = 10.0
_AT_ONCE = 64
EXTERNAL = "rollout_external_engine_addrs"
_UNAUTHORIZED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


@dataclass(frozen=True)
class AttachedEngine:
    """An engine that was found as expected.

    ranks: tensor-parallel size. version: of SGLang. compared: whether its model's config could be read here; if not,
    only its architecture is known to be the policy's.
    """

    url: str
    ranks: int
    version: str
    architecture: str
    compared: bool

    def __str__(self) -> str:
        model = self.architecture if self.compared else f"{self.architecture}, its config.json is not readable here"
        return f"{self.url} (SGLang {self.version}, {model}, tensor-parallel size {self.ranks})"


def attached_engines(config: TrainConfig, checkpoint: Path) -> list[tuple[str, int]]:
    """URL and tensor-parallel size of every engine of `rollout_external_engine_addrs`; raises what `attach` does."""
    engines = attach(config.rollout_external_engine_addrs or [], expected_engines(config, checkpoint))
    return [(engine.url, engine.ranks) for engine in engines]


def expected_engines(config: TrainConfig, checkpoint: Path, device: str | None = None) -> Expected:
    """What a job's settings ask of engines that run already."""
    return Expected(
        checkpoint,
        config.rollout_num_gpus_per_engine,
        config.update_weight_transfer_mode,
        config.return_routed_experts,
        device,
    )


def attach(addresses: Sequence[str], expected: Expected, named_by: str = EXTERNAL) -> list[AttachedEngine]:
    """Reach and check every engine, all at once, within `ANSWER_SECONDS` for each `_AT_ONCE` of them.

    Args:
        addresses: host:port of each, an IPv6 address in brackets.
        named_by: what named them, for the message.

    Raises:
        ConfigError: one or more cannot be used. The message names each of them, and of each all that is wrong, what is
            expected, by which setting, and what to do.
    """
    problems: dict[str, list[str]] = {}
    answered: dict[str, tuple[str, Answers]] = {}
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="attach") as pool:
        asked = {address: pool.submit(_ask, address, expected) for address in addresses}
        for address, job in asked.items():
            try:
                answered[address] = job.result()
            except (ConfigError, EngineError) as error:
                problems[address] = [str(error)]
    first: dict[str, str] = {}
    for address, (url, answers) in answered.items():
        wrong = list(differences(answers, expected))
        if (same := first.setdefault(_identity(url, answers), address)) != address:
            wrong.append(f"is the same engine as {same}; name it once")
        if wrong:
            problems[address] = wrong
    for address, times in Counter(addresses).items():
        if times > 1:
            problems.setdefault(address, []).append(f"is named {times} times; name it once")
    if problems:
        raise ConfigError(_message(addresses, problems, named_by))
    return [_attached(url, answers) for url, answers in answered.values()]


def twin(url: str, others: Sequence[str], expected: Expected) -> str | None:
    """Which of `others` (URLs) is the same engine as `url`, by another address; None where none is, or says so."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="attach") as pool:
        asked = {each: pool.submit(_ask, each.removeprefix("http://"), expected) for each in (url, *others)}
        found: dict[str, str] = {}
        for each, job in asked.items():
            with suppress(ConfigError, EngineError):
                found[each] = _identity(*job.result())
    return next((each for each in others if url in found and found.get(each) == found[url]), None)


def check_loopback(addresses: Sequence[str], hosts: Collection[str], named_by: str = EXTERNAL) -> None:
    """Raise ConfigError for addresses that mean another engine on each of a job's hosts."""
    local = [address for address in addresses if _is_loopback(endpoint(address)[0])]
    if local and len(hosts) > 1:
        raise ConfigError(
            f"{named_by}={','.join(addresses)}: {', '.join(local)} is another engine for each of "
            f"{', '.join(sorted(hosts))}; name the address at which all of them reach it (SGLang listens there with "
            "--host)"
        )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _message(addresses: Sequence[str], problems: dict[str, list[str]], named_by: str) -> str:
    lines = [f"{address}: {'; '.join(wrong)}" for address, wrong in problems.items()]
    those = "the engine" if len(addresses) == 1 else f"{len(lines)} of {len(set(addresses))} engines"
    start = f"{named_by}={','.join(addresses)}: {those} cannot be used:"
    return f"{start} {lines[0]}" if len(lines) == 1 else "\n  ".join([start, *lines])


def _url(address: str) -> str:
    host, port = endpoint(address)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ask(address: str, expected: Expected) -> tuple[str, Answers]:
    """Raises ConfigError for the address, EngineError for what is behind it."""
    url = _url(address)
    answers = bounded(lambda: _answers(url, expected), ANSWER_SECONDS, f"attach {address}")
    if answers is None:
        raise EngineError(f"no answer within {ANSWER_SECONDS:g} s; see whether the engine hangs, or restart it")
    return url, answers


def _answers(url: str, expected: Expected) -> Answers:
    engine = SGLangEngine(url, ANSWER_SECONDS)
    try:
        server, model = engine.server_info(), engine.model_info()
        if lacking := Answers(server, model, []).lacking():
            raise ValueError(f"its answers lack {', '.join(lacking)}")
        return Answers(server, model, _unregistered(engine, server, expected))
    except EngineTimeout:
        raise
    except EngineError as error:
        if error.status == HTTPStatus.OK:
            step = "what answers there is no SGLang server; correct the address"
        elif error.status is None:
            step = "start the engine, or correct the address"
        elif error.status in _UNAUTHORIZED:
            step = "it asks for a key, which the job does not send: restart it without --api-key"
        else:
            step = "what answers there is no SGLang server, or one that failed"
        raise EngineError(f"{error}; {step}") from error
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"what answers there is no SGLang server ({error}); correct the address") from error
    finally:
        engine.close()


def _unregistered(engine: SGLangEngine, server: dict[str, Any], expected: Expected) -> list[int]:
    if expected.mode != "p2p" or not server.get(SEED_FLAG):
        return []
    ranks = []
    for rank in range(int(server["tp_size"])):
        try:
            engine.registered_memory(rank)
        except EngineError as error:
            if error.status is None:
                raise
            ranks.append(rank)
    return ranks


def _identity(url: str, answers: Answers) -> str:
    """The same for two addresses of one server: the seconds that its start took differ between servers."""
    started = answers.server.get("startup_time")
    return json.dumps([answers.server.get("port"), started], sort_keys=True) if started else url


def _attached(url: str, answers: Answers) -> AttachedEngine:
    return AttachedEngine(
        url=url,
        ranks=answers.server["tp_size"],
        version=str(answers.server["version"]),
        architecture=", ".join(answers.model["architectures"] or ["?"]),
        compared=model_config(answers) is not None,
    )
