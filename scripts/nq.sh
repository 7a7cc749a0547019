#!/usr/bin/env bash
# Natural Questions as published: download, train, encode 21 million passages, answer accuracy. A stage whose output is whole is
# skipped, a broken one continues.
# usage: bash scripts/nq.sh OUTPUT [contaccum train options]
#   bash scripts/nq.sh runs/nq --method grad_cache --config configs/paper/24gb.yaml
# Local copies: TRAIN=biencoder-nq-train.json PASSAGES=psgs_w100.tsv QUESTIONS=nq-test.qa.csv bash scripts/nq.sh OUTPUT
# Several GPUs: LAUNCH="torchrun --nproc_per_node 4 -m" bash scripts/nq.sh OUTPUT
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
output=$1
shift
. "$(dirname "$0")/environment.sh"

TRAIN=${TRAIN:-dpr/nq-train} PASSAGES=${PASSAGES:-dpr/psgs_w100} QUESTIONS=${QUESTIONS:-dpr/nq-test-questions} # fetched by name

launch=(${LAUNCH:-python -m})
"${launch[@]}" contaccum train --config "$root/configs/paper/nq.yaml" --data.train "$TRAIN" --output_dir "$output" --resume "$@"
"${launch[@]}" contaccum encode --model "$output/model" --input "$PASSAGES" --output "$output/embeddings" --dtype float16
if ! is_newest "$output/metrics.json" "$output/embeddings"; then
    contaccum evaluate --model "$output/model" --questions "$QUESTIONS" --passages "$PASSAGES" \
        --embeddings "$output/embeddings" --output "$output/metrics.json"
fi
python -c 'import json, sys; print(json.load(open(sys.argv[1]))["mean"])' "$output/metrics.json"
