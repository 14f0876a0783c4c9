"""RL post-training over the transport: this project's own job, and the transport inside a miles job.

Importing this package imports neither miles, nor Ray, nor torch.
"""


def install() -> None:
    """Make this process's miles use this project's Mooncake backend; Ray's `worker_process_setup_hook` may name it.

    Idempotent. What is imported of miles already is changed now, the rest when it is imported.

    Raises:
        ConfigError: the miles that is installed is not one that this package knows; nothing was changed.
    """
    from miles_plugin.in_miles import installation

    installation.install()
