"""What one generated response is, before it becomes a row of a rollout batch."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One response of a policy to one prompt.

    tokens: prompt and response token ids; the last `len(log_probs)` of them are the response.
    log_probs: of each response token under the policy that sampled it, float.
    weight_versions: the policy versions that generated the response, oldest first, as decimal strings;
        more than one when a weight update landed midway; "default" before any update.
    reward: the verifier's score; advantage: what the trainer learns from.
    """

    index: int
    group: int
    prompt: str
    tokens: list[int]
    log_probs: list[float]
    response: str
    truncated: bool
    weight_versions: list[str]
    reward: float = 0.0
    advantage: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        return len(self.log_probs)
