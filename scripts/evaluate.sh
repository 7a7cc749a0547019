#!/usr/bin/env bash
# Scores a model on the test split of a BEIR folder or name.
# usage: bash scripts/evaluate.sh MODEL DATA [contaccum evaluate options]
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,3p' "$0" >&2; exit 2; }
model=$1 data=$2
shift 2
. "$(dirname "$0")/environment.sh"

contaccum evaluate --model "$model" --data "$data" "$@"
