"""Weights through a directory or an object store: what changed since the version before, tensor by tensor."""
