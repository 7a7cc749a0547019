# Sourced by the other scripts: uses the active environment or makes .venv, and installs exactly what requirements.lock names.
# A second call finds the lock unchanged and returns at once. The working folder stays; $root is the project's.
# Modules are compiled when they are first imported, and kept for all later processes.
unset PYTHONDONTWRITEBYTECODE CDPATH  # CDPATH: `cd scripts` would go to another folder, or print its name
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    if [ ! -x "$root/.venv/bin/pip" ]; then
        echo "making .venv" >&2
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "requirements.lock needs Python 3.11 or newer: set PYTHON to one")'
        "${PYTHON:-python3}" -m venv "$root/.venv"
    fi
    . "$root/.venv/bin/activate"
fi

contaccum_install() {
    local stamp wanted
    stamp="$(python -c 'import sys; print(sys.prefix)')/.contaccum-installed"
    wanted="$(cat "$root/requirements.lock" "$root/pyproject.toml" | python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())') $root"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing from requirements.lock" >&2
        python -m pip install --quiet --disable-pip-version-check --no-compile -r "$root/requirements.lock"
        python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e "$root"
        echo "$wanted" > "$stamp"
    fi
}
contaccum_install

is_newest() { # FILE FOLDER: whether FILE exists and no vectors in FOLDER are newer (they are after more training)
    [ -e "$1" ] && [ -z "$(find "$2/" -name '*.shard.json' -newer "$1")" ]
}

data_flags() { # contaccum train options: what encoding, search and evaluation must be told of them
    contaccum train "$@" --print_config | python -c '
import sys, yaml
data = yaml.safe_load(sys.stdin)["data"]
print(*(f"--{name}" for name in ("repair", "strict") if data[name]))'
}
