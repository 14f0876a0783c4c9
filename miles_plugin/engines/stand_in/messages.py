"""The bodies of requests: SGLang 0.5.23's fields and defaults, as far as the stand-in knows them."""

from typing import Any, Literal

import msgspec


class Message(msgspec.Struct, kw_only=True):
    """A request's JSON body; unknown fields are ignored, as in SGLang."""


class Empty(Message):
    """Of requests whose fields do not matter here."""


class Generate(Message):
    """input_ids, text: one prompt or several; one of the two is given."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool = False
    stream: bool = False


class AbortRequest(Message):
    abort_all: bool = False


class PauseGeneration(Message):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class InitWeightsGroup(Message):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyWeightsGroup(Message):
    group_name: str = "weight_update_group"


class UpdateFromDistributed(Message):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class UpdateFromDisk(Message):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class UpdateWeightVersion(Message):
    new_version: str
    abort_all_requests: bool = True


class CheckWeights(Message):
    action: str = "checksum"
    skip_tensor_list: list[str] | None = None
