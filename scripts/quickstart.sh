#!/usr/bin/env bash
# From nothing to a comparison: sets up, trains three methods on the demo set on the CPU, evaluates them and BM25, prints the table.
# Run again, it continues where it was stopped and prints the same table; delete runs/quickstart to begin anew.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1  # one thread a process: quick enough for so small a model, and the sums do not depend on the number of cores
bash scripts/compare.sh configs/demo.yaml runs/quickstart "grad_accum grad_cache cont_accum"
echo
echo "Trained models: runs/quickstart/METHOD/model; logs: log.jsonl; metrics of every query: metrics.json"
