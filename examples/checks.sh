# Sourced by launch.sh and small.sh: what ends a script whose settings are wrong. One line and status 2, before anything
# is started, beat a stack trace from every rank.

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
