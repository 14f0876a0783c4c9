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

# require WHAT APT_PACKAGES DNF_PACKAGES CHECK...: a system part, installed by apt when root, else named in one line.
require() {
  local what=$1 apt=$2 dnf=$3
  shift 3
  if "$@" >/dev/null 2>&1; then return; fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    fail "$what is missing: sudo apt-get install $apt (Debian, Ubuntu) or sudo dnf install $dnf (Fedora, RHEL)"
  fi
  echo "installing the system package $apt"
  # shellcheck disable=SC2086  # several packages
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $apt; } >/dev/null ||
    fail "apt-get could not install $apt"
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
has_headers='import os, sysconfig; os.stat(os.path.join(sysconfig.get_paths()["include"], "Python.h"))'
require "Python's venv module" "python$version-venv" "python$version" "$python" -c 'import ensurepip, venv'
# Mooncake's wheel links the RDMA verbs library, whether or not there is an RDMA device.
require "the system library libibverbs" libibverbs1 libibverbs "$python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")'
# pycosat, which reasoning-gym imports, comes as C source only.
require "a C compiler" "gcc libc6-dev" gcc command -v cc
require "Python's C headers" "python$version-dev" "python$version-devel" "$python" -c "$has_headers"

[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# pip and not another installer, and this exact version: an unpinned torch brings a CUDA build of several GB.
echo "installing torch $torch_version"
pip install -q "torch==$torch_version" -c requirements/cpu.lock ${torch_index:+-i "$torch_index"}
echo "installing the locked packages"
pip install -q --no-deps -r requirements/cpu.lock
pip install -q --no-deps --no-build-isolation -e .
"$venv/bin/python" -c 'import mooncake_store._native, miles_plugin.weight_transfer.disk_delta._sparse' ||
  fail "an extension in C was not built; see above"
"$venv/bin/python" -c 'import mooncake.store' || fail "Mooncake's wheel does not import; see above"
