"""One data-parallel rank of the GRPO trainer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from miles_plugin.arguments import TrainConfig
from miles_plugin.training.grpo import (
    PaddedBatch,
    clipped_policy_loss,
    next_token_log_probs,
    truncated_weights,
)
from miles_plugin.training.policy import load_sharded
from miles_plugin.training.state import load_state, save_state

# A column that the trainer adds to a rollout batch: of each response, float32, as `rollout_log_probs`.
_OLD_LOG_PROBS = "old_log_probs"


class Trainer:
    """Holds a shard of the policy and its optimizer. The default process group must be initialised.

    Args:
        config: the job's settings.
        checkpoint: Hugging Face directory the policy starts from.
        device_type: "cuda" or "cpu".
    """

    def __init__(self, config: TrainConfig, checkpoint: Path, device_type: str) -> None:
        torch.manual_seed(config.seed)
        self._config = config
        self._mesh = init_device_mesh(device_type, (dist.get_world_size(),))
        self._device = torch.device(device_type)
        self.model = load_sharded(checkpoint, self._mesh)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, partial(learning_rate_factor, config))

    def save(self, directory: Path) -> None:
        """Write everything that later training depends on into `directory`; collective."""
        save_state(directory, self.model, self._optimizer, self._scheduler)

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote: the next steps are bit for bit those that would have followed; collective.

        What the settings say of the optimizer counts, not what was saved of them.
        """
        load_state(directory, self.model, self._optimizer, self._scheduler)
        self._apply_settings()

    def _apply_settings(self) -> None:
        config = self._config
        factor = learning_rate_factor(config, self._scheduler.last_epoch)
        self._scheduler.base_lrs = [config.lr for _ in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["initial_lr"], group["lr"] = config.lr, config.lr * factor
            group["betas"], group["weight_decay"] = (config.adam_beta1, config.adam_beta2), config.weight_decay

    def train(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """Learn from this rank's shard of a rollout batch; collective over all ranks.

        Returns means over the response tokens of all ranks: loss and clip_fraction (of ratios); and grad_norm, of the
        last step.
        """
        samples = len(batch["tokens"])
        if self._config.use_tis and self._config.num_steps_per_rollout > 1:
            batch = {**batch, _OLD_LOG_PROBS: self._response_log_probs(batch)}
        totals = torch.zeros(2, device=self._device)
        grad_norm = 0.0
        steps = self._config.num_steps_per_rollout
        for step in range(steps):
            chosen = range(samples * step // steps, samples * (step + 1) // steps)
            step_totals, grad_norm = self._optimizer_step(batch, chosen)
            totals += step_totals / steps
        loss, clip_fraction = totals.tolist()
        return {"loss": loss, "clip_fraction": clip_fraction, "grad_norm": grad_norm}

    def _optimizer_step(self, batch: Mapping[str, Any], rows: Sequence[int]) -> tuple[torch.Tensor, float]:
        config = self._config
        tokens = torch.tensor(float(sum(batch["rollout_mask_sums"][row] for row in rows)), device=self._device)
        dist.all_reduce(tokens)
        tokens.clamp_(min=1.0)  # a step whose samples are all masked teaches nothing; it is not a division by zero
        totals = torch.zeros(2, device=self._device)
        for _, padded in self._micro_batches(batch, rows):
            log_probs = self._log_probs(padded)
            if config.use_tis and _OLD_LOG_PROBS not in batch:  # of the first step's policy, which is the only one
                padded = replace(padded, old_log_probs=log_probs.detach())
            weights = truncated_weights(padded, config.tis_clip) if config.use_tis else 1.0
            loss, clipped = clipped_policy_loss(log_probs, padded, weights, config.eps_clip, config.eps_clip_high)
            # FSDP averages gradients over the ranks; the token mean is over all ranks' tokens together.
            torch.autograd.backward(loss * dist.get_world_size() / tokens)
            totals += torch.stack([loss.detach(), clipped])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_grad)
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(totals)
        return totals / tokens, float(norm.full_tensor())  # type: ignore[attr-defined]  # a DTensor under FSDP2

    @torch.no_grad()
    def _response_log_probs(self, batch: Mapping[str, Any]) -> list[npt.NDArray[np.float32]]:
        """Of each row's response tokens, under the policy as it is."""
        found: dict[int, npt.NDArray[np.float32]] = {}
        for rows, padded in self._micro_batches(batch, range(len(batch["tokens"]))):
            for row, log_probs in zip(rows, self._log_probs(padded).cpu().numpy(), strict=True):
                found[row] = log_probs[_response(batch, row)]
        return [found[row] for row in range(len(found))]

    def _log_probs(self, padded: PaddedBatch) -> torch.Tensor:
        logits = self.model(padded.tokens, attention_mask=padded.attention_mask, use_cache=False).logits
        return next_token_log_probs(logits, padded.tokens, self._config.rollout_temperature)

    def _micro_batches(
        self, batch: Mapping[str, Any], rows: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], PaddedBatch]]:
        # By length, so that little of a micro-batch is padding; every rank has equally many, which FSDP needs.
        ordered = sorted(rows, key=lambda row: len(batch["tokens"][row]))
        size = self._config.micro_batch_size
        for start in range(0, len(ordered), size):
            chosen = ordered[start : start + size]
            yield chosen, pad(batch, chosen, self._device)


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """Share of `lr` at an optimizer step: a linear rise over `lr_warmup_iters`, then constant or down to `min_lr`."""
    if step < config.lr_warmup_iters:
        return (step + 1) / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return 1.0
    total = config.num_rollout * config.num_steps_per_rollout
    left = max(0.0, (total - step) / max(1, total - config.lr_warmup_iters))
    floor = config.min_lr / config.lr
    return floor + (1 - floor) * left


def pad(batch: Mapping[str, Any], rows: Sequence[int], device: torch.device) -> PaddedBatch:
    """Copy some rows of a rollout batch (numpy views, read-only) into padded tensors on `device`.

    batch: with a column of its responses' log-probabilities under the old policy, unless that sampled them.
    """
    lengths = [len(batch["tokens"][row]) for row in rows]
    shape = (len(rows), max(lengths))
    tokens, attention = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    response_mask, sampled, old = (np.zeros((shape[0], shape[1] - 1), np.float32) for _ in range(3))
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[i, :length] = batch["tokens"][row]
        attention[i, :length] = 1
        response = _response(batch, row)
        response_mask[i, response] = batch["loss_masks"][row]
        sampled[i, response] = batch["rollout_log_probs"][row]
        old[i, response] = batch.get(_OLD_LOG_PROBS, batch["rollout_log_probs"])[row]
    advantages = np.asarray([batch["rewards"][row] for row in rows], np.float32)
    return PaddedBatch(
        *(torch.from_numpy(a).to(device) for a in (tokens, attention, response_mask, sampled, old, advantages))
    )


def _response(batch: Mapping[str, Any], row: int) -> slice:
    """Where, among the log-probabilities of a row's next tokens, those of its response are."""
    end = len(batch["tokens"][row]) - 1
    return slice(end - int(batch["response_lengths"][row]), end)
