import importlib


def load_function(path, *, sync_required=False):
    if not path:
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
