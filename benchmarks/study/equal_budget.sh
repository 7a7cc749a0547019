#!/usr/bin/env bash
# Compare the methods at equal cost, each with the N, bank, replay share and learning rate that are best on dev. All rows train without dropout.
#   MODEL=DIR MEDQUAD=BEIR_DIR SCIFACT=BEIR_DIR XQUAD=DPR_DIR bash benchmarks/study/equal_budget.sh SET [OPTIONS...]
# SET: medquad, scifact, xquad or demo. OPTIONS go to `contaccum compare`. Started again, it does what is missing; a higher SEEDS
# adds runs. BUDGET (6144f; demo: 80000f), SEEDS (3), OUT (runs/equal), DEVICE (cpu). The result is OUT/SET-BUDGET/report.html.
set -euo pipefail
cd "$(dirname "$0")/../.."
export TOKENIZERS_PARALLELISM=false
name=${1:?SET is missing: medquad, scifact, xquad or demo}
shift
out=${OUT:-runs/equal} options=(--seeds "${SEEDS:-3}" --run.device "${DEVICE:-cpu}" --keep_weights false --run.save_steps 0)

if [ "$name" = demo ]; then
    budget=${BUDGET:-80000f}
    PYTHONPATH=benchmarks python -c "import pathlib, invented_set; invented_set.write_invented_set(pathlib.Path('$out/data/demo'))"
    options+=(--config configs/study/demo.yaml --settings configs/study/methods-demo.yaml --data.train "$out/data/demo" --data.dev "$out/data/demo"
        --replay.share 1)
else
    budget=${BUDGET:-6144f} cut=()
    case $name in
        medquad) source=${MEDQUAD:-} length=32 ;;
        scifact) source=${SCIFACT:-} length=32 cut=(--held_out 150) ;;
        xquad) source=${XQUAD:-} length=64 cut=(--held_out 140) ;;
        *) echo "$name: no such set; choose medquad, scifact, xquad or demo" >&2 && exit 2 ;;
    esac
    [ -f "${MODEL:-}/config.json" ] || { echo "MODEL='${MODEL:-}' has no config.json; it must be an encoder folder" >&2 && exit 2; }
    python benchmarks/study/cut.py "$source" "$out/data/$name" "${cut[@]}"
    options+=(--config configs/study/short.yaml --settings configs/study/methods.yaml --model.name "$MODEL"
        --model.dropout 0 --model.max_passage_length "$length" --data.train "$out/data/$name/train" --data.dev "$out/data/$name/dev"
        --test "$out/data/$name/test" --run.drift_steps 32)
fi
python -m contaccum compare "${options[@]}" --budget "$budget" --output_dir "$out/$name-$budget" "$@"
