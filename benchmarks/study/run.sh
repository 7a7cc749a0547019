#!/usr/bin/env bash
# The runs of docs/results/small_encoder.md, part by part. Started again, it does what is missing and nothing else.
#   MODEL=DIR MEDQUAD=BEIR_DIR SCIFACT=BEIR_DIR bash benchmarks/study/run.sh [PART...]
# Parts: medquad (four methods at M = N, learning rates tuned on dev), aged (rows weighed by age), scifact (both), bank (M = 8 N),
# switches, all_methods (passage_bank), tied (towers that share their weights), six (MODEL6, another encoder, at RATE6), n128
# (N = 128), time (updates that fit into grad_cache's time), hybrid (with age), cut (micro-batches by tokens), demo.
# MODEL: encoder folder. SEEDS (5), RATES (1e-4,2e-4,4e-4,8e-4), METHODS of the first part, OUT (runs/study), DEVICE (cpu),
# PRECISION (fp32).
# Afterwards: python benchmarks/study/pack.py OUT study.jsonl.gz && python benchmarks/study/tables.py study.jsonl.gz
set -euo pipefail
cd "$(dirname "$0")/../.."
export TOKENIZERS_PARALLELISM=false
seeds=${SEEDS:-5} out=${OUT:-runs/study}
config=configs/study/short.yaml device=${DEVICE:-cpu} rates=${RATES:-1e-4,2e-4,4e-4,8e-4}

setting() { # setting NAME: what the config says
    sed -En "s/^ *$1: *([^ #]+).*/\1/p" "$config"
}
n=$(setting global_batch_size)

aged=(--bank.age_decay 1 --bank.row_weight current)

fail() {
    echo "$1" >&2
    exit 2
}

data() { # data NAME: cuts the set and prints its folder
    local source held=0
    case $1 in
        medquad) source=${MEDQUAD:-} ;;
        scifact) source=${SCIFACT:-} held=150 ;;
    esac
    [ -f "$source/corpus.jsonl" ] || fail "$1: '$source' has no corpus.jsonl, expected MEDQUAD and SCIFACT to be BEIR folders"
    python benchmarks/study/cut.py "$source" "$out/data/$1" --held_out "$held" --sample 400
    echo "$out/data/$1"
}

compare() { # compare NAME SET OPTIONS...: one comparison, in OUT/NAME
    local name=$1 place
    place=$(data "$2")
    shift 2
    [ -f "${MODEL:-}/config.json" ] || fail "MODEL='${MODEL:-}' has no config.json, expected an encoder folder"
    python -m contaccum compare --config "$config" --output_dir "$out/$name" --model.name "$MODEL" --run.device "$device" \
        --run.precision "${PRECISION:-fp32}" \
        --data.train "$place/train" --data.dev "$place/dev" --test "$place/test" --baselines none "$@"
}

rate() { # rate NAME METHOD: the learning rate that comparison NAME chose for METHOD
    local found
    found=$(ls -d "$out/$1/runs/$2-learning_rate="*-seed0/metrics.json 2>/dev/null | head -n 1)
    [ -n "$found" ] || fail "part $1 has not chosen a learning rate for $2 yet: run it first"
    basename "$(dirname "$found")" | sed 's/.*learning_rate=//; s/-seed0//'
}

for part in ${*:-medquad aged scifact bank switches all_methods tied n128 time hybrid cut demo}; do
    echo "== $part" >&2
    case $part in
        medquad)
            compare medquad medquad --methods "${METHODS:-grad_accum,grad_cache,cont_accum,cont_cache}" --seeds "$seeds" \
                --rungs 1 --tune "optim.learning_rate=$rates" --baselines bm25,untrained
            ;;
        aged)
            compare aged medquad --methods cont_accum "${aged[@]}" --seeds "$seeds" --rungs 1 --tune "optim.learning_rate=$rates"
            ;;
        scifact)
            compare scifact scifact --methods grad_accum,grad_cache,cont_accum --seeds "$seeds" \
                --rungs 1 --tune "optim.learning_rate=$rates" --baselines bm25,untrained
            compare scifact-aged scifact --methods cont_accum "${aged[@]}" --seeds "$seeds" --rungs 1 --tune "optim.learning_rate=$rates"
            ;;
        bank)
            compare bank medquad --methods cont_accum,cont_cache --bank.size $((8 * n)) --seeds "$seeds" \
                --rungs 1 --tune "optim.learning_rate=$rates"
            ;;
        switches)
            own=$(rate medquad cont_accum)
            for switch in bank.row_weight=current bank.keep=false loss.mask_false_negatives=false; do
                compare "switches-${switch#*.}" medquad --methods cont_accum --seeds "$seeds" --optim.learning_rate "$own" \
                    "--${switch%=*}" "${switch#*=}"
            done
            ;;
        all_methods)
            compare all_methods medquad --methods passage_bank --seeds "$seeds" --rungs 1 --tune "optim.learning_rate=$rates"
            ;;
        n128) # at the rates that N = 64 chose
            [ "$n" != 128 ] || continue
            compare n128 medquad --methods grad_cache --seeds "$seeds" --optim.learning_rate "$(rate medquad grad_cache)" \
                --batch.global_batch_size 128
            compare n128-aged medquad --methods cont_accum "${aged[@]}" --seeds "$seeds" \
                --optim.learning_rate "$(rate aged cont_accum)" --batch.global_batch_size 128
            ;;
        time) # updates that fit into the time of grad_cache's, at 0.84 of it for one
            steps=$(($(setting max_steps) * 100 / 84 + 1))
            compare time-aged medquad --methods cont_accum "${aged[@]}" --seeds "$seeds" --optim.max_steps "$steps" \
                --optim.learning_rate "$(rate aged cont_accum)"
            compare time-scifact-aged scifact --methods cont_accum "${aged[@]}" --seeds "$seeds" --optim.max_steps "$steps" \
                --optim.learning_rate "$(rate scifact-aged cont_accum)"
            ;;
        hybrid) # with rows weighed by age
            compare cache-aged medquad --methods cont_cache "${aged[@]}" --seeds "$seeds" \
                --optim.learning_rate "$(rate medquad grad_cache)"
            ;;
        cut) # texts long enough to differ in length
            longest=$(setting max_passage_length)
            [ "$longest" -ge 128 ] || longest=128
            for way in pairs tokens; do
                cut=(--model.max_passage_length "$longest")
                [ "$way" = pairs ] || cut+=(--batch.micro_batch_tokens $(($(setting micro_batch_size) * (longest + $(setting max_query_length)))))
                compare "cut-$way" medquad --methods grad_accum --seeds "$seeds" \
                    --optim.learning_rate "$(rate medquad grad_accum)" "${cut[@]}"
                compare "cut-$way-aged" medquad --methods cont_accum "${aged[@]}" --seeds "$seeds" \
                    --optim.learning_rate "$(rate aged cont_accum)" "${cut[@]}"
            done
            ;;
        tied) # at the rate that MedQuAD's dev chose for grad_cache
            own=$(rate medquad grad_cache)
            compare tied medquad --methods grad_cache --seeds "$seeds" --model.tie_towers true --optim.learning_rate "$own"
            compare tied-aged medquad --methods cont_accum "${aged[@]}" --seeds "$seeds" --model.tie_towers true \
                --optim.learning_rate "$own"
            ;;
        six) # all-MiniLM-L6-v2 with all its layers
            [ -f "${MODEL6:-}/config.json" ] || fail "MODEL6='${MODEL6:-}' has no config.json, expected an encoder folder"
            own=${RATE6:-4e-4}
            MODEL=$MODEL6 compare six medquad --methods grad_cache --seeds "$seeds" --optim.learning_rate "$own" --baselines untrained
            MODEL=$MODEL6 compare six-aged medquad --methods cont_accum "${aged[@]}" --seeds "$seeds" --optim.learning_rate "$own"
            ;;
        demo)
            PYTHONPATH=benchmarks python -c "import pathlib, invented_set; invented_set.write_invented_set(pathlib.Path('$out/data/demo'))"
            demo=(compare --config configs/study/demo.yaml --replay.share 1 --optim.epochs 5 --data.train "$out/data/demo" --data.dev "$out/data/demo" --run.device "$device" --seeds "$seeds" --rungs 1 --tune optim.learning_rate=5e-4,1e-3,2e-3)
            python -m contaccum "${demo[@]}" --methods grad_accum,grad_cache,cont_accum,cont_cache --bank.age_decay 0 \
                --bank.row_weight all --output_dir "$out/demo"
            python -m contaccum "${demo[@]}" --methods cont_accum "${aged[@]}" --output_dir "$out/demo-aged" --baselines none
            ;;
        *) fail "part $part: expected medquad, aged, scifact, bank, switches, all_methods, tied, six, n128, time, hybrid, cut or demo" ;;
    esac
done
