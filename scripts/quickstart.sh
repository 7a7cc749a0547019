#!/usr/bin/env bash
# From nothing to a comparison: sets up, trains four methods on the demo set on the CPU, evaluates them, the untrained encoder and
# BM25, prints a table and writes a page with curves. Run again, it does what is missing; delete runs/quickstart to begin anew.
set -euo pipefail
CDPATH= cd "$(dirname "$0")/.."
. scripts/environment.sh
export OMP_NUM_THREADS=1  # one thread a process: quick enough for so small a model, and the sums do not depend on the number of cores
contaccum compare --config configs/demo.yaml --settings study/methods-quickstart --budget 80000f --seeds 1 --output_dir runs/quickstart
contaccum report runs/quickstart/runs/*
echo
echo "Page with tests and curves: runs/quickstart/report.html; trained models: runs/quickstart/runs/METHOD-seed0/model"
