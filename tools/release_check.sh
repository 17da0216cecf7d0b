#!/usr/bin/env bash
# Installs the wheel of dist/ in an empty environment and runs it; $1: the Python to make it with.
set -euo pipefail
unset PYTHONPATH  # else pip finds the clone and installs nothing
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
wheel="$(ls dist/*.whl)"
"$1" -m zipfile -l "$wheel" | grep '^kdissect/py.typed ' > /dev/null  # for users' type checkers
"$1" -m zipfile -l "$wheel" | awk '{print $1}' | sed -n 's|^\(kdissect/[^/]*/\).*|\1|p' | sort | uniq -c
"$1" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$wheel"
export NUMBA_CACHE_DIR="$work/compiled"
capture="$PWD/captures/librdkafka.pcap"
cd "$work"
"$work/venv/bin/kdissect" --version
"$work/venv/bin/kdissect" show "$capture" > shown
test "$(wc -l < shown)" -ge 300
"$work/venv/bin/python" -c "import kdissect; print(kdissect.read('$capture').exchanges)"
if ls "$work/compiled" 2> /dev/null | grep -q code; then
  echo "the wheel's machine code was not used: $(ls "$work/compiled")" >&2
  exit 1
fi
echo "release-check: $(basename "$wheel") shows and reads, and compiles nothing"
