"""What miles's own hooks will be pointed at. The names are reserved: naming one of them now is refused at the start.

miles looks a hook up with getattr when it builds what calls it, so a job ends there and not at its first update.
"""

from typing import NoReturn

from mooncake_store.errors import ConfigError

_RESERVED = {
    "post_write": ("--custom-update-weight-post-write-path", "miles publishes deltas without a hook"),
    "DataBuffer": ("--custom-async-data-buffer-path", "miles has a buffer of its own"),
}


def __getattr__(name: str) -> NoReturn:
    if name in _RESERVED:
        flag, instead = _RESERVED[name]
        raise ConfigError(
            f"{flag} {__name__}.{name}: this miles-mooncake does not have it yet; leave {flag} out: {instead}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it will have {', '.join(_RESERVED)}")
