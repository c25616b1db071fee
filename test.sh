#!/usr/bin/env bash
# Installs sqlsem and everything its tests need into .venv, and runs them. Arguments go to pytest: ./test.sh -k mutex
#   ./test.sh          what every change must pass, some minutes
#   ./test.sh --quick  while you edit, half a minute
#   ./test.sh --all    everything, as at night (--rest: what the first one leaves out)
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
pytest=(.venv/bin/python -m pytest)
if [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]]; then # bytecode is kept in any case, at the place that tests/conftest.py chooses
    pytest=(env -u PYTHONDONTWRITEBYTECODE "PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$PWD/.pytest_cache/bytecode}" "${pytest[@]}")
fi
# What is imported is compiled then: half of an installation's time goes into compiling all the rest.
pip() { PIP_NO_COMPILE=1 .venv/bin/python -m pip --quiet --disable-pip-version-check --no-input "$@"; }
has_pyodbc() { .venv/bin/python -c 'import pyodbc' 2>/dev/null; }
has_dotnet() { .venv/bin/python -c 'import sys; from clients.mixed import dotnet; sys.exit(bool(dotnet.lacks(odbc=True)))'; }
has_pgbouncer() { PATH=$PATH:/usr/sbin command -v pgbouncer >/dev/null; }
has_mariadb() { # and what its clusters need
    local program PATH=$PATH:/usr/sbin
    for program in mariadbd mariadb-install-db wsrep_sst_rsync rsync lsof; do
        command -v "$program" >/dev/null || return
    done
    [[ -e /usr/lib/galera/libgalera_smm.so ]]
}

set_up() {
    pip install --upgrade 'pip>=25.1' filelock # a pip that knows --group, and what the next line needs
    # Microsoft's ODBC driver, T-SQL parser and .NET, out of wheels (95 MB, once); not installed, only unpacked into .venv.
    timeout 600 .venv/bin/python tests/microsoft.py &
    pip install --editable '.[postgres]' --group test
    pip install --group odbc || echo "pyodbc cannot be installed here; going on without SQL Server." >&2
    # Collecting compiles all tests. Once is enough, while the rest is fetched: else each worker does it.
    "${pytest[@]}" --collect-only -q -n 0 >/dev/null 2>&1 &

    # pyodbc needs the system's unixODBC. Without it everything but SQL Server works, and is tested. The .NET client's
    # tests need a C# compiler and the ODBC driver of PostgreSQL, those of MariaDB its server; without them they are left
    # out, and the last lines say so. Only root can install those, and only by apt; nobody needs to.
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null &&
        ! { has_pyodbc && has_dotnet && has_pgbouncer && has_mariadb; }; then
        install() { DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq install -y --no-install-recommends "$@"; }
        {
            timeout 120 apt-get -qq update
            has_pyodbc || install unixodbc libgssapi-krb5-2
            has_dotnet ||
                install mono-mcs mono-runtime libmono-system-data4.0-cil libmono-i18n-west4.0-cil odbc-postgresql odbcinst
            has_pgbouncer || RUNLEVEL=1 install pgbouncer # (not to be started)
            has_mariadb || RUNLEVEL=1 install mariadb-server galera-4 rsync lsof
        } >/dev/null 2>&1 </dev/null || true
    fi
    wait
}
# What is installed already for this pyproject.toml, this script and this user need not be installed again.
readonly stamp=.venv/set-up
state=$(cat pyproject.toml test.sh tests/microsoft.py | cksum; id -u)
if [[ $(cat "$stamp" 2>/dev/null) != "$state" ]]; then
    set_up
    echo "$state" >"$stamp"
fi
if ! has_pyodbc; then
    echo "unixODBC is missing (on Debian: apt-get install unixodbc); going on without SQL Server." >&2
fi

# Tests wait for each other's processes more than they compute: on a small machine three workers for each core take half
# the time. The quick ones do not wait, and each worker takes seconds to collect.
if [[ -z ${PYTEST_XDIST_AUTO_NUM_WORKERS:-} ]]; then
    factor=3
    [[ " $* " != *" --quick "* ]] || factor=1
    PYTEST_XDIST_AUTO_NUM_WORKERS=$(.venv/bin/python -c "import os; n = os.cpu_count() or 1; print(n if n > 6 else $factor * n)")
    export PYTEST_XDIST_AUTO_NUM_WORKERS
fi
exec "${pytest[@]}" -n auto --dist worksteal "$@"
