"""``python -m sqlsem``: the command line."""

import sys

from sqlsem.cli import main

if __name__ == "__main__":
    sys.argv[0] = "sqlsem"  # what the queue shows as our program
    main(prog_name="sqlsem")
