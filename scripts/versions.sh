#!/usr/bin/env bash
# Runs the tests with another Python or with the oldest allowed versions. The package is installed in a new environment, outside the
# checkout. Needs uv and a network. Arguments: the Python, `highest` or `lowest-direct`, then pytest's.
#   UV_TORCH_BACKEND=cpu bash scripts/versions.sh 3.13
#   UV_TORCH_BACKEND=cpu bash scripts/versions.sh 3.10 lowest-direct tests/methods
# EXTRAS=cpu leaves out the extra dev, which needs newer versions of transformers and others than the package itself does.
set -euo pipefail
root=$(CDPATH= cd "$(dirname "$0")/.." && pwd)
python=${1:?name a Python, for example 3.12}
resolution=${2:-highest}
shift $(($# < 2 ? $# : 2))
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

mkdir "$place/copy"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | tar --null -cf - -T -) | tar -xf - -C "$place/copy"
uv venv --quiet --python "$python" "$place/venv"
. "$place/venv/bin/activate"
# a folder, not a wheel: uv chooses the oldest versions only for the dependencies of what it builds
uv pip install --quiet --resolution "$resolution" "$place/copy[${EXTRAS:-cpu,tensorboard,study,docs,dev}]" \
    'pytest>=8.0' 'pytest-xdist>=3.5' 'hypothesis>=6.140'
uv pip freeze
cd "$place" # not in the copy: the installed package is imported
contaccum doctor
cd "$place/copy"
OMP_NUM_THREADS=1 pytest -q "$@"
