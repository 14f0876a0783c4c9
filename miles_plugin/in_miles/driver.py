"""Imported when Python starts in the driver of a submitted Ray job whose setup hook is `miles_plugin.install`.

By miles_mooncake.pth, which lies beside the installed packages: Ray runs that hook in workers only, and a driver with
miles's own store could not read what they put.
"""

from miles_plugin import install
from mooncake_store.errors import ConfigError

try:
    install()
except ConfigError as error:
    # Anything else would be printed and forgotten, and the driver would go on without.
    raise SystemExit(f"miles_plugin.install, asked for by the job's worker_process_setup_hook: {error}") from None
