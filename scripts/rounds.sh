#!/usr/bin/env bash
# Mines hard negatives with BM25 and trains MODEL on them; then, ROUNDS times, mines with the trained model and trains MODEL again.
# OUTPUT contains mined-0.jsonl (of BM25), round-0 (a training run), mined-1.jsonl (of round-0/model), round-1, and so on.
# usage: bash scripts/rounds.sh MODEL DATA OUTPUT ROUNDS [contaccum train options]
#   bash scripts/rounds.sh sentence-transformers/all-MiniLM-L6-v2 my_data runs/rounds 1
# A second call skips finished mining and finished steps of a training. If DATA changes, use another OUTPUT.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,6p' "$0" >&2; exit 2; }
model=$1 data=$2 output=$3 rounds=$4
shift 4
. "$(dirname "$0")/environment.sh"

miner=bm25
for round in $(seq 0 "$rounds"); do
    mined=$output/mined-$round.jsonl run=$output/round-$round
    if [ ! -e "$mined" ]; then
        contaccum mine --model "$miner" --data "$data" --output "$mined" --num_negatives 5 --relative_margin 0.05
    fi
    contaccum train --config "$root/configs/finetune.yaml" --model.name "$model" --data.train "$mined" \
        --data.hard_negatives 1 --output_dir "$run" --resume "$@"
    miner=$run/model
done
