"""Network addresses as settings give them: taken apart, looked up and reached, each within a bound."""

from __future__ import annotations

import ipaddress
import re
import socket
import urllib.request
from urllib.parse import urlsplit

from mooncake_store.bounded import bounded
from mooncake_store.errors import ConfigError

LOOKUP_SECONDS = 3.0  # a name server that does not answer would hold getaddrinfo for much longer
_HOST = re.compile(r"[\w.-]+")
_HTTP_PORTS = {"http": 80, "https": 443}
# A master is inside the cluster, where a proxy for the world outside (http_proxy) does not lead.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def endpoints(address: str) -> list[tuple[str, int]]:
    """Read "host:port", "etcd://host:port[;host:port]" or an http(s) URL as (host, port) pairs, at least one.

    Raises:
        ConfigError: another form, several hosts without etcd://, or a port outside 1 to 65535.
    """
    scheme, separator, rest = address.rpartition("://")
    if scheme in _HTTP_PORTS:
        return [_http_endpoint(address)]
    if separator and scheme != "etcd":
        raise ConfigError(f"{address!r} has the unknown scheme {scheme!r}")
    entries = [entry.strip() for entry in re.split("[;,]", rest)]
    if len(entries) > 1 and scheme != "etcd":
        raise ConfigError(f"{address!r} names several hosts; only etcd:// takes more than one")
    return [endpoint(entry, address) for entry in entries]


def endpoint(entry: str, address: str | None = None) -> tuple[str, int]:
    """Read "host:port", an IPv6 address in brackets, as (host, port).

    Args:
        address: that `entry` is a part of, for the message.

    Raises:
        ConfigError: another form, or a port outside 1 to 65535.
    """
    host, _, port = entry.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not is_host(bare) or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        where = "" if address is None else f" in {address!r}"
        raise ConfigError(f"{entry!r}{where} is not host:port with a port of 1 to 65535")
    return bare, int(port)


def fetch(url: str, timeout: float) -> bytes:
    """What a master's HTTP port answers, past any proxy; raises what `urllib.request.urlopen` and `read` raise."""
    with _DIRECT.open(url, timeout=timeout) as answer:
        body: bytes = answer.read()
    return body


def is_host(text: str) -> bool:
    """Whether `text` has the form of a host name or an IP address, without a port."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return True


def not_of_this_host(host: str) -> str | None:
    """Why the name or address `host` is none of this host's, found out within LOOKUP_SECONDS; None when it is one."""
    try:
        found = bounded(lambda: socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM), LOOKUP_SECONDS, "name lookup")
    except (OSError, UnicodeError):  # UnicodeError: an empty or overlong label
        found = None
    if not found:
        return "this name has no address here"
    if any(_can_bind(family, address) for family, *_, address in found):
        return None
    addresses = ", ".join(sorted({str(address[0]) for *_, address in found}))
    return f"{addresses} is no address of this host"


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
        return True
    except OSError:
        return False


def unreachable(address: str, timeout: float) -> str | None:
    """Why none of the endpoints of `address` accepts a TCP connection within `timeout` seconds; None when one does.

    Nothing is sent. Raises what `endpoints` raises.
    """
    found = endpoints(address)
    reasons = []
    for host, port in found:
        reason = _refusal(host, port, timeout / len(found))
        if reason is None:
            return None
        reasons.append(f"{host}:{port}: {reason}")
    return "; ".join(reasons)


def address_towards(host: str, port: int) -> str:
    """Address of this host's interface that routes to host:port; loopback when that is local or has no route."""

    def find() -> str:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: picks the route and sends nothing
            return str(probe.getsockname()[0])

    try:
        return bounded(find, LOOKUP_SECONDS, "name lookup") or "127.0.0.1"
    except (OSError, UnicodeError):
        return "127.0.0.1"


def _refusal(host: str, port: int, timeout: float) -> str | None:
    def connect() -> bool:
        socket.create_connection((host, port), timeout=timeout).close()
        return True

    try:
        # Bounded as a whole: the timeout of create_connection does not cover its name lookup.
        return None if bounded(connect, timeout, "probe") else f"no answer in {timeout:g} s"
    except (OSError, UnicodeError) as error:
        return str(error)


def _http_endpoint(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or _HTTP_PORTS[parts.scheme]
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from None
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host")
    return parts.hostname, port
