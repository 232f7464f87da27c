#!/bin/sh
# Makes the environments of the engines that `make test-engines` compares with, one each, from PyPI: .engines/NAME.
# What cannot be installed is named, and its tests are skipped. A list may name a source that is unpacked beside it.
#
#   scripts/make-engines.sh [python3.12]
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
python=$("$root/scripts/find-python.sh" "${1:-}") || exit 1
to=${S2_ENGINES:-$root/.engines}

# A release's source, where there is one to add, in VENV/source; nothing of it is built.
add_source() {
    [ -z "$1" ] && return
    "$2/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: -d "$2/source" "$1" &&
        tar xzf "$2"/source/*.tar.gz -C "$2/source"
}

for list in "$root"/tests/engines/requirements-*.txt; do
    engine=$(basename "$list" .txt)
    engine=${engine#requirements-}
    venv=$to/$engine
    cmp -s "$list" "$venv/.installed" && continue
    echo "== $venv: installing what ${list#"$root"/} lists: up to 3 GB to download, 6 GB on the disk and 20 minutes, silently"
    rm -rf "$venv"
    if "$python" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$list" &&
        add_source "$(sed -n 's/^# source: //p' "$list")" "$venv"; then
        cp "$list" "$venv/.installed"
    else
        rm -rf "$venv"
        echo "note: $engine could not be installed; its tests are skipped" >&2
    fi
done
