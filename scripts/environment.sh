# Sourced by the other scripts: uses the active environment or makes .venv, and installs exactly what requirements.lock names.
# A second call finds the lock unchanged and returns at once.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    if [ ! -x .venv/bin/python ]; then
        echo "making .venv" >&2
        "${PYTHON:-python3}" -m venv .venv
    fi
    . .venv/bin/activate
fi

contaccum_install() {
    local stamp wanted
    stamp="$(python -c 'import sys; print(sys.prefix)')/.contaccum-installed"
    wanted="$(cat requirements.lock pyproject.toml | python -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())') $PWD"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing from requirements.lock" >&2
        python -m pip install --quiet --disable-pip-version-check -r requirements.lock
        python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
        echo "$wanted" > "$stamp"
    fi
}
contaccum_install
