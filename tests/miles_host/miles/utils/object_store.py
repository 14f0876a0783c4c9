"""One store per process, behind a closed choice of two backends."""

import enum
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass

import ray
from miles.utils.ray_utils import Box

StoreObjectRef = Box
_INSTANCE = None


class ObjectStoreBackend(enum.Enum):
    RAY = "ray"
    MOONCAKE = "mooncake"


@dataclass(frozen=True)
class ValueSpec:
    codec: str
    dtype: str | None = None


class ObjectStoreGetResult:
    def __init__(self, value, release_fn):
        self._value, self._release = value, release_fn

    @property
    def value(self):
        return self._value

    def __enter__(self):
        return self._value

    def __exit__(self, *_):
        self._release(self._value)


def init_instance(args, *, contribute_segment=None):
    global _INSTANCE
    assert _INSTANCE is None, "initialised twice"
    _INSTANCE = _create_instance(args, contribute_segment=contribute_segment)
    return _INSTANCE


def get_instance():
    assert _INSTANCE is not None, "not initialised"
    return _INSTANCE


def _create_instance(args, *, contribute_segment):
    if ObjectStoreBackend(args.object_store_backend) is ObjectStoreBackend.RAY:
        return RayObjectStore()
    if contribute_segment is None:
        contribute_segment = int(os.environ.get("LOCAL_RANK", "0")) == 0
    return MooncakeObjectStore(args, contribute_segment=contribute_segment)


class BaseObjectStore(ABC):
    @abstractmethod
    def put(self, value, value_spec=None): ...

    @abstractmethod
    def get(self, ref): ...

    @abstractmethod
    def remove(self, ref): ...


class RayObjectStore(BaseObjectStore):
    def put(self, value, value_spec=None):
        return Box(ray.put(value))

    def get(self, ref):
        return ObjectStoreGetResult(ray.get(ref.inner), lambda _: None)

    def remove(self, ref):
        pass


class MooncakeObjectStore(BaseObjectStore):
    """As on an image without the module that it needs."""

    def __init__(self, args, *, contribute_segment):
        raise ImportError("mooncake.structured_object_store is missing")

    def put(self, value, value_spec=None): ...

    def get(self, ref): ...

    def remove(self, ref): ...
