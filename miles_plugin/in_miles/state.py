"""What is changed in this process's miles: asked by who changes it, and by refs, which need to know nothing of that."""

import threading
from types import ModuleType
from typing import Any


class Installation:
    """Whether the backend is installed here, and of each change: module, name, what was there before, what is now."""

    def __init__(self) -> None:
        self.active = self.hooked = False
        self.changed: list[tuple[ModuleType, str, Any, Any]] = []
        self.lock = threading.RLock()

    def replace(self, module: ModuleType, name: str, new: Any, before: Any = None) -> None:
        """`before` is what is put back, if not what is there now."""
        there = getattr(module, name)
        self.changed.append((module, name, there if before is None else before, new))
        setattr(module, name, new)

    def has(self, module: ModuleType, name: str) -> bool:
        """Whether the module's name is ours at this moment; a reload brings miles's back."""
        return any(each[:2] == (module, name) and getattr(module, name) is each[3] for each in self.changed)


# Of the process, as miles's own store is.
installation = Installation()
