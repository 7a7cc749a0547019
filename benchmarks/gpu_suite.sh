#!/usr/bin/env bash
# Check and measure contaccum on a GPU, in three parts of at most 9 minutes: docs/gpu-suite.md.
#   bash benchmarks/gpu_suite.sh OUT [--part 1|2|3] [--device cpu] [--quick]
exec "${PYTHON:-python3}" "$(dirname "$0")/gpu_suite.py" "$@"
