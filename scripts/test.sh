#!/usr/bin/env bash
# Sets up and runs the test suite in two processes; arguments go to pytest (bash scripts/test.sh -m acceptance; bash scripts/test.sh -k bank).
set -euo pipefail
. "$(dirname "$0")/environment.sh"
cd "$root"
exec python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
