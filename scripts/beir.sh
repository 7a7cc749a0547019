#!/usr/bin/env bash
# A BEIR data set from its name (or a folder in its layout): download, train, encode, search, evaluate. A stage whose output is
# whole is skipped, a broken one continues.
# usage: bash scripts/beir.sh DATA OUTPUT [contaccum train options]
#   bash scripts/beir.sh fiqa runs/fiqa --method cont_accum --model.name sentence-transformers/all-MiniLM-L6-v2
# Several GPUs: LAUNCH="torchrun --nproc_per_node 4 -m" bash scripts/beir.sh DATA OUTPUT
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,6p' "$0" >&2; exit 2; }
data=$1 output=$2
shift 2
. "$(dirname "$0")/environment.sh"

launch=(${LAUNCH:-python -m})
data=$(contaccum data fetch "$data")
settings=(--config "$root/configs/finetune.yaml" --config "$root/scripts/default_model.yaml" --data.train "$data"
    --data.repair true --output_dir "$output" "$@")
"${launch[@]}" contaccum train "${settings[@]}" --resume
flags=$(data_flags "${settings[@]}" --data.strict false) # encode and search have no --strict
"${launch[@]}" contaccum encode --model "$output/model" --input "$data" --output "$output/embeddings" $flags
if ! is_newest "$output/test.trec" "$output/embeddings"; then
    contaccum search --model "$output/model" --data "$data" --split test --embeddings "$output/embeddings" $flags \
        --output "$output/test.trec"
fi
qrels=$data/qrels/test.tsv
[ -e "$qrels" ] || qrels+=.gz
contaccum evaluate --run "$output/test.trec" --qrels "$qrels" --output "$output/metrics.json"
