#!/usr/bin/env bash
# Two nodes: rollout on the head, training on the worker. See docs/two-node.md, or `launch.sh --help`.
# PYTHON names the interpreter of the environment that both nodes have; default: .venv of this checkout, else python3.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$root/.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi
command -v "$PYTHON" >/dev/null || {
  printf 'launch.sh: there is no %s; name an interpreter with PYTHON=...\n' "$PYTHON" >&2
  exit 2
}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m examples.two_node_fsdp.launch "$@"
