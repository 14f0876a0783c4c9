"""A buffer of the user's in the place of this project's: `--custom-async-data-buffer-path`.

It decides what is kept, in which order, and what comes out. Whatever it does, a group is trained on once at most, whole
and as it was asked for, and who waits for a buffer that has ended is told so.
"""

import asyncio
import inspect
from argparse import Namespace
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from miles_plugin.fully_async.buffer import BufferSettings, DataBuffer
from miles_plugin.fully_async.contract import DataBufferConstructorInput
from miles_plugin.fully_async.groups import DataBufferInput, PromptGroup, is_aborted, iter_samples
from miles_plugin.fully_async.staleness import ASKED
from miles_plugin.rollout.functions import CustomFunctionError, check_call, describe, find
from mooncake_store.errors import ConfigError

SETTING = "custom_async_data_buffer_path"
Result = TypeVar("Result")


def load_buffer_class(path: str) -> Callable[[DataBufferConstructorInput], Any]:
    """The class at `path`, "package.module.Class".

    Raises:
        ConfigError: no such class, importing it failed, or it is not what `contract.DataBuffer` says.
    """
    named = f"{SETTING}={path}"
    found = find(SETTING, path, "Class")
    if not inspect.isclass(found):
        raise ConfigError(f"{named}: {type(found).__name__}, not a class; it must have put, get and get_metrics")
    for method, is_async, given, options in (
        ("put", True, ("input",), ()),
        ("get", True, (), ("current_version",)),
        ("get_metrics", False, (), ()),
    ):
        function = getattr(found, method, None)
        if function is None or getattr(function, "__isabstractmethod__", False):
            raise ConfigError(f"{named}: it has no {method}; it must have put, get and get_metrics")
        if inspect.iscoroutinefunction(function) != is_async:
            raise ConfigError(f"{named}: {method} must be {'async' if is_async else 'an ordinary method, not async'}")
        check_call(f"{named}: {method}", function, ("self", *given), options)
    check_call(named, found, ("input",))
    return found


class CustomBuffer(DataBuffer):
    """A `DataBuffer` whose groups lie in one of the user's; made in the loop that it is used in.

    Args:
        path: names the class.
        args: what it is given as its settings.
        regenerate, dropped: as of `DataBuffer`.

    Raises:
        ConfigError: as `load_buffer_class`.
        CustomFunctionError: it cannot be made.
    """

    def __init__(
        self,
        path: str,
        args: Namespace,
        regenerate: Callable[[PromptGroup], None],
        dropped: Callable[[PromptGroup], None],
    ) -> None:
        settings = BufferSettings.of(args)
        super().__init__(settings, regenerate, dropped=dropped)
        self._named = f"{SETTING}={path}"
        self._on_unused = regenerate if settings.unused == "retry" else dropped
        self._sizes: dict[int, int] = {}  # samples of each group that lies there
        self._ended = asyncio.get_running_loop().create_future()
        made = load_buffer_class(path)
        self._theirs = self._called("", made, DataBufferConstructorInput(args, self._unused))

    async def put(self, input: DataBufferInput) -> None:
        """Raises CustomFunctionError where the user's fails, and else as `DataBuffer.put`."""
        self._check_open()
        self._sizes[input.prompt_group[0].group_index] = len(list(iter_samples(input.group)))
        await self._until_ended(self._awaited("put", self._theirs.put, input))

    async def get(
        self,
        current_version: int | None = None,
        *,
        batch: int | None = None,  # noqa: ARG002
        **_context: Any,
    ) -> DataBufferInput:
        """Raises CustomFunctionError where the user's fails or what it hands out is not a group that it has, and else
        as `DataBuffer.get`. One that waits is not told of an announcement."""
        self._check_open()
        self._watermark.note(current_version, ASKED)
        taken = await self._until_ended(self._awaited("get", self._theirs.get, current_version=self.current_version))
        self._check(taken)
        return DataBufferInput(taken.prompt_group, taken.group)

    def get_metrics(self) -> dict[str, float]:
        """The user's own; raises CustomFunctionError when they are no numbers by name."""
        metrics = self._called("get_metrics", self._theirs.get_metrics)
        try:
            return {str(name): float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise CustomFunctionError(f"{self._named}: get_metrics returned {metrics!r:.200}: {error}") from None

    def close(self) -> None:
        super().close()
        if not self._ended.done():
            self._ended.set_result(None)

    def _unused(self, prompts: PromptGroup) -> None:
        self._leaves(prompts[0].group_index)
        self._on_unused(prompts)

    def _check(self, taken: Any) -> None:
        try:
            number, samples = taken.prompt_group[0].group_index, list(iter_samples(taken.group))
            aborted = is_aborted(samples)
            size = self._leaves(number)
        except (AttributeError, LookupError, TypeError) as error:
            raise CustomFunctionError(f"{self._named}: get returned what is no group of its: {error}") from None
        if len(samples) != size:
            raise CustomFunctionError(
                f"{self._named}: get returned group {number} with {len(samples)} samples, {size} were put; a group is "
                "trained on whole"
            )
        if aborted:
            raise CustomFunctionError(
                f"{self._named}: get returned group {number}, of which a sample was aborted; give its prompt_group to "
                "unused_handler_fn"
            )

    def _leaves(self, number: int) -> int:
        """How many samples the group has; LookupError unless it is there."""
        if number not in self._sizes:
            raise LookupError(
                f"group {number} is not there; it was never put, or was returned or given to unused_handler_fn before"
            )
        return self._sizes.pop(number)

    async def _until_ended(self, call: Coroutine[Any, Any, Result]) -> Result:
        """What a call returns, unless the buffer is closed or fails before it does."""
        calling = asyncio.ensure_future(call)
        try:
            await asyncio.wait({calling, self._ended}, return_when=asyncio.FIRST_COMPLETED)
            self._check_open()
            return calling.result()
        finally:
            calling.cancel()

    async def _awaited(self, method: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        try:
            return await function(*given, **options)
        except (Exception, SystemExit) as error:
            raise self._failed(method, function, error) from error

    def _called(self, method: str, function: Callable[..., Any], *given: Any) -> Any:
        try:
            return function(*given)
        except (Exception, SystemExit) as error:
            raise self._failed(method, function, error) from error

    def _failed(self, method: str, function: Callable[..., Any], error: BaseException) -> CustomFunctionError:
        return CustomFunctionError(f"{self._named}: {method and method + ': '}{describe(error, function)}")
