"""How fast weights reach engines: `miles-mooncake bench weights`."""
