# Sourced by launch.sh and small.sh, after checks.sh: PYTHON becomes a Python with torch and Megatron. It is the one that
# is given, else that of PATH (an activated environment, a container), else .venv's, which `make install` makes.

has_megatron() {
    "$1" -c 'import sys, importlib.util as u; sys.exit(None in map(u.find_spec, ("torch", "megatron")))' > /dev/null 2>&1
}

require_megatron() {
    has_megatron "$PYTHON" ||
        fail "PYTHON=$PYTHON has no torch or no megatron; expected both; run \`make install\`, or set PYTHON"
}

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python
    venv=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
    if [[ -x $venv ]] && ! has_megatron "$PYTHON"; then PYTHON=$venv; fi
fi
