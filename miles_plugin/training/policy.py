"""A Hugging Face causal language model, sharded over the trainer ranks by FSDP2."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

# What engines load and receive; the trainer keeps float32 masters.
WEIGHT_DTYPE = torch.bfloat16


def load_sharded(checkpoint: Path, mesh: DeviceMesh) -> PreTrainedModel:
    """The model of `checkpoint` in float32, each decoder layer and the rest a `fully_shard` unit over `mesh`.

    On CUDA the compute runs in bfloat16 with float32 gradient reduction; on a CPU in float32, which is faster there.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    on_gpu = mesh.device_type == "cuda"
    precision = MixedPrecisionPolicy(WEIGHT_DTYPE, torch.float32) if on_gpu else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return model.to(mesh.device_type)
