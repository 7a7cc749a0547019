#!/usr/bin/env bash
# Trains a retriever on your own BEIR folder, then evaluates it.
# usage: bash scripts/train.sh DATA OUTPUT [MODEL] [contaccum train options]
#   bash scripts/train.sh my_data runs/mine sentence-transformers/all-MiniLM-L6-v2 --method grad_cache
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4p' "$0" >&2; exit 2; }
data=$1 output=$2 model=()
shift 2
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    model=(--model.name "$1")
    shift
fi
. "$(dirname "$0")/environment.sh"

settings=(--config "$root/configs/finetune.yaml" --config "$root/scripts/default_model.yaml" ${model[@]+"${model[@]}"}
    --data.train "$data" --output_dir "$output" "$@")
contaccum train "${settings[@]}" --resume
if [ -e "$data/qrels/test.tsv" ] || [ -e "$data/qrels/test.tsv.gz" ]; then
    contaccum evaluate --model "$output/model" --data "$data" --output "$output/metrics.json" $(data_flags "${settings[@]}")
fi
