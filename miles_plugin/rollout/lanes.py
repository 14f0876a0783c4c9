"""Lanes of the rollout manager's actor: calls that must not wait behind a rollout (Ray's concurrency groups)."""

# Acknowledgements: they make room for a put that may be waiting for it.
ACKNOWLEDGE = "acknowledge"
# Looking after engines, and progress.
CONTROL = "control"
