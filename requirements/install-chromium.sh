#!/usr/bin/env bash
# The browser that the tests of report.html need: installed by apt when root, otherwise named.
set -euo pipefail

has_browser() { command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null; }
fail() { printf 'miles-mooncake: %s\n' "$*" >&2; exit 1; }

if has_browser; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  fail "Chromium is missing: sudo apt-get install chromium (Debian) or sudo dnf install chromium (Fedora, RHEL)"
fi
echo "installing the system package chromium"
{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } \
  >/dev/null || fail "apt-get could not install chromium"
has_browser || fail "the package chromium brought no browser; on Ubuntu it is a snap: install google-chrome-stable"
