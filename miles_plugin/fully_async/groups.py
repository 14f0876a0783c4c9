"""What goes through the buffer: a finished group of samples, and the prompts that it was made of."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from miles_plugin.rollout.sample import Sample

# An item is a list where one prompt's trajectory became several samples, as miles allows it.
Group = Sequence[Sample | Sequence[Sample]]
PromptGroup = Sequence[Sample]


@dataclass
class DataBufferInput:
    """One finished group, under miles's names.

    prompt_group: what it was generated from; it can be generated again. group: the finished samples. run_id: the run
    whose policy made it, None when that is not known; miles has no such field.
    """

    prompt_group: PromptGroup
    group: Group
    run_id: str | None = None


def iter_samples(group: Group) -> Iterator[Sample]:
    """The samples of a group, in order."""
    for item in group:
        if isinstance(item, Sequence):
            yield from item
        else:
            yield item


def is_aborted(group: Group) -> bool:
    """Whether a sample was aborted, so that there is nothing to compare the others with."""
    # By value: in a miles job the samples are miles's, with a Status of their own.
    return any(sample.status.value == Sample.Status.ABORTED.value for sample in iter_samples(group))


def prompts_only(prompts: PromptGroup) -> PromptGroup:
    """The prompts without what was generated: where a function generates in place, they hold all of it as well."""
    return [
        Sample(sample.index, sample.group_index, sample.prompt, sample.label, sample.metadata)
        if type(sample) is Sample and (sample.tokens or sample.response)
        else sample
        for sample in prompts
    ]
