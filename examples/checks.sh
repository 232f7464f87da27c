# Sourced by launch.sh and small.sh: what ends a script whose settings are wrong. One line and status 2, before anything
# is started, beat a stack trace from every rank. PYTHON becomes a Python with torch and Megatron: the one that is given,
# else that of PATH (an activated environment, a container), else .venv's, which `make install` makes.

# fail "NAME=$NAME; expected ...; what to do"
fail() {
    echo "error: $(basename "$0"): $1" >&2
    exit 2
}

# is_number VALUE LEAST MOST
is_number() { [[ $1 =~ ^(0|[1-9][0-9]{0,8})$ ]] && (($1 >= $2 && $1 <= $3)); }

# require NAME HINT: it has to be set.
require() { [[ -n ${!1:-} ]] || fail "$1 is not set; $2"; }

# require_count NAME EXAMPLE: if it is set, it is a number.
require_count() {
    [[ -z ${!1:-} ]] || is_number "${!1}" 1 999999999 || fail "$1=${!1}; expected a number, 1 or more, such as $1=$2"
}

# require_folder NAME: where folders can be made, or one that can be written.
require_folder() {
    local place=${!1}
    until [[ -e $place || -L $place ]]; do place=$(dirname -- "$place"); done
    [[ -d $place ]] || fail "$1=${!1}; $place is no folder; expected a folder, there or to be made; name another one"
    [[ -w $place ]] || fail "$1=${!1}; $place cannot be written; expected a folder that can; name another one"
}

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
