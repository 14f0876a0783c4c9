"""What miles's own hooks may be pointed at, by a name that stays.

miles looks a hook up with getattr when it builds what calls it; that is when a name that is only reserved is refused,
and a miles that is not known.
"""

from typing import Any

from mooncake_store.errors import ConfigError


def __getattr__(name: str) -> Any:
    if name == "DataBuffer":
        # Not above: what imports miles is for a process that has it.
        from miles_plugin.in_miles import names

        if not names.is_importable():
            raise ConfigError(
                f"{__name__}.{name} is for a miles job, and there is no miles here; this project's own job has that "
                "buffer without --custom-async-data-buffer-path"
            )
        names.check_buffer()
        from miles_plugin.in_miles.data_buffer import DataBuffer

        return DataBuffer
    if name == "post_write":
        flag = "--custom-update-weight-post-write-path"
        raise ConfigError(
            f"{flag} {__name__}.{name}: this miles-mooncake does not have it yet; leave {flag} out: miles publishes "
            "deltas without a hook"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has DataBuffer, and will have post_write")
