"""What the settings of a fully asynchronous job come to."""

from miles_plugin.arguments import TrainConfig


def concurrent_samples(config: TrainConfig) -> int:
    """Samples in flight at most: as many as a rollout batch has, unless the settings say otherwise."""
    return config.async_max_concurrent_samples or config.rollout_batch_size * config.n_samples_per_prompt
