class Box:
    """Keeps Ray from replacing an object reference among a call's arguments by its value."""

    def __init__(self, inner):
        self._inner = inner

    @property
    def inner(self):
        return self._inner
