"""``python -m sqlsem``: the command line."""

import sys

from sqlsem.cli import main

if __name__ == "__main__":
    sys.argv[0] = "sqlsem"  # the name that the queue shows
    main(prog_name="sqlsem")
