#!/usr/bin/env bash
# Checks and measures contaccum on a GPU, step by step: docs/gpu-suite.md.
#   [PYTHON=python3] [DEVICE=cpu] bash benchmarks/gpu_suite.sh [--quick] OUT [STEP...]
# Default: all steps. --quick: smallest sizes, which only show that the suite works; DEVICE=cpu implies it.
set -euo pipefail
steps=(doctor tests precision shrink resume stalls methods_8 methods_64 methods_tokens defaults peers plan encode search study)
quick=()
if [ "${1:-}" = --quick ]; then
    quick=(--quick)
    shift
fi
out=$(realpath -m "${1:?OUT is missing: a folder for logs and figures}")
shift
names=("$@")
for name in "${names[@]}"; do
    [[ " ${steps[*]} " == *" $name "* ]] || { echo "$name: no such step; choose from ${steps[*]}" >&2 && exit 2; }
done
[ ${#names[@]} -gt 0 ] || names=("${steps[@]}")
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python3} PYTHONPATH=$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
device=${DEVICE:-auto} precision=bf16
if [ "$device" = cpu ]; then
    quick=(--quick) precision=fp32
elif ! "$PYTHON" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "torch sees no CUDA device; for the smallest sizes on the CPU, set DEVICE=cpu" >&2
    exit 2
fi
made=$out/made${quick:+-quick}
mkdir -p "$out"
write_invented="import pathlib, sys, invented_set; invented_set.write_invented_set(pathlib.Path(sys.argv[1]))"
if ! { { [ -d "$made" ] || "$PYTHON" benchmarks/made.py "$made" "${quick[@]}"; } &&
    "$PYTHON" -c "$write_invented" "$out/invented"; } >"$out/made.log" 2>&1; then
    echo "the encoder and the texts were not made; see $out/made.log" >&2
    exit 1
fi
made_options=(--model "$made/model" --data "$made/data")
timing_options=(--model "$made/model" --real_texts "$made/data" --precision "$precision")
measure() { command=("$PYTHON" "benchmarks/$1.py" --json "$out/$name.json" --device "$device" "${quick[@]}" "${@:2}"); }

failed=0
for name in "${names[@]}"; do
    limit=200
    case $name in
        doctor) command=("$PYTHON" -m contaccum doctor) ;;
        tests)
            # only these files: tests of other packages, which may be missing here, cannot be collected
            mapfile -t files < <(grep -l "mark.gpu" tests/*/test_*.py)
            command=("$PYTHON" -m pytest -q -rs -p no:cacheprovider -m gpu "${files[@]}")
            ;;
        precision | shrink | resume | stalls) measure gpu_checks --check "$name" "${made_options[@]}" ;;
        methods_8 | methods_64)
            measure methods "${timing_options[@]}" --micro "${name#methods_}" --pairs 256 --sizes 1024 16384 131072 --repeats 3
            ;;
        methods_tokens) measure methods "${timing_options[@]}" --tokens 32768 --pairs 256 --sizes 1024 --repeats 3 --kernels 15 ;;
        defaults) measure defaults "${made_options[@]}" ;;
        peers) measure peers "${timing_options[@]}" --token_budget ;;
        plan) measure plan_error "${made_options[@]}" ;;
        encode) measure encode "${made_options[@]}" --repeats 3 ;;
        search) measure search --repeats 3 ;;
        study)
            limit=540
            command=("$PYTHON" -m contaccum compare --config configs/study/demo.yaml --data.train "$out/invented" --output_dir "$out/study"
                --run.device "$device" --run.save_steps 0 --replay.share 1 --optim.epochs 5)
            if [ ${#quick[@]} -gt 0 ]; then
                command+=(--methods grad_accum,cont_accum --seeds 1 --baselines none --optim.max_steps 4 --model.tiny_width 32
                    --model.tiny_vocabulary 300)
            else
                command+=(--methods grad_accum,grad_cache,cont_accum,cont_cache --seeds 3)
            fi
            ;;
    esac
    begin=$SECONDS code=0
    timeout -k 10 "${LIMIT:-$limit}" "${command[@]}" >"$out/$name.log" 2>&1 </dev/null || code=$?
    case $code in
        0) state=passed ;;
        77) state=skipped ;;
        124 | 137) state=stopped ;;
        *) state=failed failed=1 ;;
    esac
    echo "$name: $state in $((SECONDS - begin)) s ($(grep -v '^\s*$' "$out/$name.log" | tail -n 1 | cut -c1-300))" | tee -a "$out/steps.log"
done
exit $failed
