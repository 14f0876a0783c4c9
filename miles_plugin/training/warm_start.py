"""The short supervised phase that brings a tiny policy to where RL has something to reinforce. Cached."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from miles_plugin.arguments import PolicyArguments, TrainConfig
from miles_plugin.checkpoint import check_writable
from miles_plugin.rollout.prompts import Item
from miles_plugin.rollout.task import Task
from miles_plugin.training.tiny_policy import build_model, build_tokenizer, save_checkpoint
from mooncake_store.errors import ConfigError

# Part of the cache key: raise it when the recipe below changes what comes out.
_RECIPE = 1
_VALIDATION_SIZE = 256
_CHECK_EVERY = 20
_REPORT_EVERY = 100
_WARMUP_STEPS = 20


class WarmStartError(RuntimeError):
    """The supervised phase did not reach the accuracy that RL starts from."""


def warm_started_checkpoint(
    config: TrainConfig, report: Callable[[str], None], each_step: Callable[[], None] = lambda: None
) -> Path:
    """The checkpoint directory of a warm-started tiny policy: from the cache, or made now.

    Training stops at the first check at which the greedy accuracy on validation items (never the held-out ones)
    reaches `warm_start_accuracy`.

    Args:
        config: the job's settings.
        report: told how it goes.
        each_step: called at every step; what it raises ends the training.

    Raises:
        WarmStartError: it did not within `warm_start_max_steps`.
    """
    cached = _cached(config)
    if (summary := _cached_summary(cached)) is not None:
        report(f"warm start: accuracy {summary['accuracy']:.2f} after {summary['steps']} steps, cached in {cached}")
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cache_dir={config.cache_dir}: {error}; name a directory that can be written") from error
    report(f"warm start: supervised until {config.warm_start_accuracy:.0%} of the validation items are right")
    disable_progress_bar()
    model, summary = _train(config, report, each_step)
    partial = cached.with_name(f"{cached.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_checkpoint(model, build_tokenizer(), partial)
    (partial / "warm_start.json").write_text(json.dumps(summary))
    if _cached_summary(cached) is not None:  # another run finished the same one first
        shutil.rmtree(partial)
        return cached
    shutil.rmtree(cached, ignore_errors=True)
    return partial.rename(cached)


def is_cached(config: TrainConfig) -> bool:
    """Whether a tiny policy of these settings was made before."""
    return _cached_summary(_cached(config)) is not None


def check_cache(config: TrainConfig) -> None:
    """Raise ConfigError if a tiny policy must be made and `cache_dir` cannot keep it."""
    if config.hf_checkpoint is None and not is_cached(config):
        check_writable("cache_dir", config.cache_dir)


def _cached(config: TrainConfig) -> Path:
    return config.cache_dir / "warm-start" / _cache_key(config)


def _cached_summary(cached: Path) -> dict[str, float] | None:
    """What `warm_start.json`, the last file to be written, says; None when there is no complete checkpoint."""
    try:
        summary: dict[str, float] = json.loads((cached / "warm_start.json").read_text())
    except (OSError, ValueError):
        return None
    return summary


def _cache_key(config: TrainConfig) -> str:
    settings = {name: getattr(config, name) for name in PolicyArguments.model_fields if name != "cache_dir"}
    settings |= {"task": config.task, "task_kwargs": config.task_kwargs, "seed": config.seed, "recipe": _RECIPE}
    settings |= {"held_out_size": config.held_out_size, "max_new_tokens": config.rollout_max_response_len}
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _train(
    config: TrainConfig, report: Callable[[str], None], each_step: Callable[[], None]
) -> tuple[PreTrainedModel, dict[str, float]]:
    task = Task(config.task, config.task_kwargs, config.held_out_size, config.seed)
    tokenizer = build_tokenizer()
    model = build_model(config.tiny_hidden_size, config.tiny_num_layers, config.seed, config.tiny_num_experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_start_lr, betas=(0.9, 0.95), weight_decay=0.01)
    validation = task.validation(_VALIDATION_SIZE)
    items = task.warm_start()
    started, accuracy = time.monotonic(), 0.0
    for step in range(1, config.warm_start_max_steps + 1):
        each_step()
        for group in optimizer.param_groups:
            group["lr"] = config.warm_start_lr * min(1.0, step / _WARMUP_STEPS)
        loss = _answer_loss(model, tokenizer, list(islice(items, config.warm_start_batch_size)))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % _CHECK_EVERY == 0:
            accuracy = _greedy_accuracy(model, tokenizer, task, validation, config.rollout_max_response_len)
            seconds = time.monotonic() - started
            if step % _REPORT_EVERY == 0 or accuracy >= config.warm_start_accuracy:
                report(f"warm start: step {step}, loss {loss.item():.3f}, accuracy {accuracy:.2f}, {seconds:.0f} s")
            if accuracy >= config.warm_start_accuracy:
                return model, {"steps": step, "accuracy": accuracy, "seconds": round(seconds, 1)}
    raise WarmStartError(
        f"task {config.task!r}: accuracy {accuracy:.2f} after warm_start_max_steps={config.warm_start_max_steps}, "
        f"warm_start_accuracy={config.warm_start_accuracy} wanted; make the task easier, the policy larger "
        "(tiny_hidden_size, tiny_num_layers) or allow more steps"
    )


def _answer_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, items: Sequence[Item]) -> torch.Tensor:
    prompts = [tokenizer.encode(item.prompt, add_special_tokens=False) for item in items]
    answers = [[*tokenizer.encode(item.label, add_special_tokens=False), tokenizer.eos_token_id] for item in items]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    tokens = torch.full((len(items), longest), tokenizer.pad_token_id)
    labels = torch.full((len(items), longest), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    # Padding is on the right, so a causal model needs no mask to leave it out.
    logits = model(tokens, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@torch.no_grad()
def _greedy_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, task: Task, items: Sequence[Item], max_new_tokens: int
) -> float:
    correct = 0
    for prompts, chosen in _by_length(tokenizer, items):
        output = model.generate(prompts, max_new_tokens=max_new_tokens, do_sample=False,
                                attention_mask=torch.ones_like(prompts))  # fmt: skip
        answers = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
        correct += sum(task.score(answer, item) == 1.0 for answer, item in zip(answers, chosen, strict=True))
    return correct / len(items)


def _by_length(tokenizer: PreTrainedTokenizerFast, items: Sequence[Item]) -> Iterator[tuple[torch.Tensor, list[Item]]]:
    """Items whose prompts have equally many tokens, together: they decode as one batch without padding."""
    groups: dict[int, list[tuple[list[int], Item]]] = {}
    for item in items:
        prompt = tokenizer.encode(item.prompt, add_special_tokens=False)
        groups.setdefault(len(prompt), []).append((prompt, item))
    for group in groups.values():
        yield torch.tensor([prompt for prompt, _ in group]), [item for _, item in group]
