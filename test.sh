#!/usr/bin/env bash
# Installs sqlsem and everything its tests need into .venv, and runs them. Arguments go to pytest: ./test.sh -k mutex
# PYTHON chooses the Python (3.10 or later) of a new .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

good() { "$@" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

if ! good .venv/bin/python; then
    for python in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11 python3.10; do
        good "$python" && break
    done
    good "$python" || { echo "This needs Python 3.10 or later with venv (on Debian: apt-get install python3-venv)." >&2; exit 1; }
    rm -rf .venv
    "$python" -m venv .venv
fi
pip() { .venv/bin/python -m pip --quiet --disable-pip-version-check --no-input "$@"; }
pip install --upgrade 'pip>=25.1' # which knows --group
pip install --editable '.[postgres,mssql]' --group test

# pyodbc needs the system's unixODBC. Without it everything but SQL Server works, and is tested.
if ! .venv/bin/python -c 'import pyodbc' 2>/dev/null; then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y unixodbc; } >/dev/null 2>&1 </dev/null || true
    fi
    .venv/bin/python -c 'import pyodbc' 2>/dev/null ||
        echo "unixODBC is missing (on Debian: apt-get install unixodbc); going on without SQL Server." >&2
fi

exec .venv/bin/python -m pytest -n auto "$@"
