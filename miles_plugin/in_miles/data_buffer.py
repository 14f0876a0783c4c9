"""The buffer of `miles_plugin.fully_async` by miles's contract; imported only inside a miles process.

`--custom-async-data-buffer-path miles_plugin.hooks.DataBuffer`. miles makes one at the first rollout, and from then on
calls it in one event loop.
"""

from typing import Any

from miles.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter
from miles.rollout.fully_async_data_buffer import DataBuffer as MilesDataBuffer
from miles.rollout.fully_async_data_buffer import DataBufferConstructorInput, DataBufferInput
from miles.utils.misc import load_function

from miles_plugin.fully_async import buffer
from miles_plugin.fully_async.counts import PREFIX
from miles_plugin.fully_async.groups import is_aborted
from miles_plugin.in_miles.numbering import Numbering


class DataBuffer(MilesDataBuffer):  # type: ignore[misc]  # of miles, which need not be installed
    """miles's `DataBuffer` with the rules of docs/async.md.

    Args:
        input: miles's. Of its args are read async_data_buffer_capacity_factor, rollout_batch_size,
            max_weight_staleness, async_unused_samples_handler and dynamic_sampling_filter_path.

    Raises:
        ConfigError: one of these is not allowed; a ConfigError is a ValueError.
    """

    def __init__(self, input: DataBufferConstructorInput) -> None:
        args = self._args = input.args
        self._filter, self._filtered = load_function(args.dynamic_sampling_filter_path), MetricGatherer()
        self._numbering = Numbering()
        self._buffer = buffer.DataBuffer(
            buffer.BufferSettings.of(args),
            # miles has made it of --async-unused-samples-handler: it does what "drop" asks for, too.
            input.unused_handler_fn,
            dropped=input.unused_handler_fn,
            number=self._numbering.number_of,
        )

    async def put(self, input: DataBufferInput) -> None:
        """Take a finished group, waiting while the buffer is full. One that was aborted goes to the handler of unused
        ones, one that `--dynamic-sampling-filter-path` does not keep goes nowhere."""
        if not is_aborted(input.group):
            verdict = call_dynamic_filter(self._filter, self._args, input.group)
            if not verdict.keep:
                self._filtered.on_dynamic_filter_drop(reason=verdict.reason)
                return
        await self._buffer.put(input)

    async def get(self, current_version: int | None = None, **_context: Any) -> DataBufferInput:
        """The next group to train on, waiting until there is one; those before it that must not be go to the handler.

        Args:
            current_version: as the trainer has pushed it; None before the first push.
        """
        taken = await self._buffer.get(self._numbering.current(current_version))
        return DataBufferInput(prompt_group=taken.prompt_group, group=taken.group)

    def get_metrics(self) -> dict[str, float]:
        """See docs/async.md, and what the dynamic filter did not keep, by reason; the counters start anew."""
        filtered, self._filtered = self._filtered.collect(), MetricGatherer()
        steps_back = {f"{PREFIX}version_steps_back": self._numbering.take_steps_back()}
        return {**self._buffer.get_metrics(), **steps_back, **filtered}
