"""What one generated response is, before it becomes a row of a rollout batch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class Sample:
    """One response of a policy to one prompt, under miles's field names, so that functions written for miles fit.

    index: of the sample in its run. group_index: of its prompt; samples of one prompt are one GRPO group.
    prompt: text, with any chat template applied. label: the reference answer, as the prompts' source has it.
    tokens: prompt and response token ids; the last `response_length` are the response, tool output included.
    loss_mask: per response token 1 if the policy wrote it, 0 if a tool did; None means all 1.
    rollout_log_probs: per response token, under the policy that sampled it; 0.0 where loss_mask is 0.
    rollout_routed_experts: [len(tokens) - 1, layers, experts per token] int32, of an MoE policy.
    weight_versions: the policy versions that generated the response, oldest first, as decimal strings;
        more than one when a weight update landed midway; "default" before any update.
    reward: what the reward function said, None before; advantage: what the trainer learns from.
    remove_sample: keeps the sample out of the loss.
    """

    class Status(Enum):
        """How a response ended.

        TRUNCATED: at the token limit. ABORTED: by the engine or the environment; it is generated again.
        FAILED: something in the environment went wrong, but what there is counts.
        """

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    index: int = 0
    group_index: int = 0
    prompt: str = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: npt.NDArray[np.int32] | None = None
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    reward: float | None = None
    advantage: float = 0.0
    remove_sample: bool = False

    @property
    def effective_loss_mask(self) -> list[int]:
        """Per response token, whether it counts in the loss."""
        if self.remove_sample:
            return [0] * self.response_length
        return [1] * self.response_length if self.loss_mask is None else self.loss_mask

    @property
    def effective_response_length(self) -> int:
        """Response tokens that the policy wrote."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def update_from_meta_info(self, args: object, meta_info: Mapping[str, Any]) -> None:  # noqa: ARG002  # as in miles
        """Note what an engine's answer says of itself: the versions that made it, and how it ended."""
        merge_versions(self.weight_versions, meta_info)
        reasons = {"stop": self.Status.COMPLETED, "length": self.Status.TRUNCATED, "abort": self.Status.ABORTED}
        self.status = reasons[meta_info["finish_reason"]["type"]]


def numbered(sample: Sample, group: int, position: int, size: int) -> Sample:
    """The same sample as number `position` of group `group`, of `size`."""
    return replace(sample, index=group * size + position, group_index=group)


def merge_versions(versions: list[str], meta_info: Mapping[str, Any]) -> None:
    """Append the versions that made one answer of an engine, unless the last one noted is the same."""
    for span in meta_info["weight_versions"]:
        if not versions or versions[-1] != span["version"]:
            versions.append(span["version"])


def in_order(versions: Iterable[str]) -> list[str]:
    """The oldest first, as numbers: "9" before "10". One that is no number is that of an engine before its first."""
    return sorted(versions, key=lambda version: (int(version) if version.isdigit() else -1, version))
