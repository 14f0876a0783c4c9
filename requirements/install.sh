#!/usr/bin/env bash
# Make the virtual environment of `make demo` and `make test`. Usage: install.sh VENV [PYTHON [TORCH_INDEX]]
# Safe to rerun: what is installed already is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 python=${2:-python3} torch_index=${3:-}
torch_version=2.13.0

fail() { printf 'miles-mooncake: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "no '$python' on PATH: install Python 3.11, 3.12 or 3.13, or name one with PYTHON=..."
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
  fail "$("$python" --version) is not supported: name a Python 3.11, 3.12 or 3.13 with PYTHON=..."

# Mooncake's wheel links the RDMA verbs library, whether or not there is an RDMA device.
if ! ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1'; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing the system package libibverbs1"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libibverbs1; } >/dev/null ||
      fail "apt-get could not install libibverbs1"
  else
    fail "the system library libibverbs is missing: sudo apt-get install libibverbs1 (Debian, Ubuntu) or sudo dnf install libibverbs (Fedora, RHEL)"
  fi
fi

if [ ! -x "$venv/bin/pip" ]; then
  "$python" -m venv "$venv" || fail "could not make $venv: on Debian and Ubuntu, sudo apt-get install python3-venv"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# pip and not another installer, and this exact version: an unpinned torch brings a CUDA build of several GB.
echo "installing torch $torch_version"
pip install -q "torch==$torch_version" -c requirements/cpu.lock ${torch_index:+-i "$torch_index"}
echo "installing the locked packages"
pip install -q --no-deps -r requirements/cpu.lock
pip install -q --no-deps --no-build-isolation -e .
"$venv/bin/python" -c 'import mooncake.store' || fail "Mooncake's wheel does not import; see above"
