"""Run locks of every kind under faults of every kind, until each engine has given so many grants: ``python
tests/soak``.

It goes from place to place (a database, and its possible faults), a minute in each, and checks the records after every
one. A file keeps the results: stop it with Ctrl-C, and the same command continues. A report ends it; exit code 1 says
that it found something, and kept the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(TESTS), str(TESTS.parent), str(TESTS / "faults")]

from soak import jobs, night  # noqa: E402
from soak.paces import DENSE, USUAL  # noqa: E402
from soak.places import PLACES  # noqa: E402
from soak.record import Record  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/soak", description=(__doc__ or "").partition("\n")[2])
    parser.add_argument("--grants", type=int, default=1_000_000, help="of each engine (default: 1,000,000)")
    parser.add_argument("--seconds", type=float, help="end after so many seconds, however many grants there were")
    parser.add_argument("--night", type=float, default=60.0, help="seconds in one place (default: 60)")
    parser.add_argument("--engine", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--place", action="append", help=f"only this one; may be repeated: {[place.name for place in PLACES]}"
    )
    parser.add_argument(
        "--dense", action="store_true", help="for many grants: less time inside, less often a fault, no slow jobs"
    )
    parser.add_argument(
        "--kind", action="append", choices=jobs.KINDS["postgresql"], help="only jobs of this kind; may be repeated"
    )
    parser.add_argument("--seed", type=int, help="of the first night; the next ones count on")
    parser.add_argument(
        "--record", type=Path, default=Path("build/soak.json"), help="the file (default: build/soak.json)"
    )
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    chosen.record.parent.mkdir(parents=True, exist_ok=True)
    record = Record(chosen.record)
    pace = DENSE if chosen.dense else USUAL
    if chosen.kind is not None:
        pace = dataclasses.replace(pace, kinds=tuple(chosen.kind))
    selected = [
        kind
        for kind in PLACES
        if (chosen.engine is None or kind.engine in chosen.engine)
        and (chosen.place is None or kind.name in chosen.place)
    ]
    places = []
    for kind in selected:
        lacks = kind.lacks() if jobs.chosen(kind.engine, pace) else "a job of such a kind"
        if lacks is None:
            places.append(kind)
        else:
            record.not_run[kind.name] = lacks
            print(f"not run: {kind.name} (needs {lacks})", flush=True)
    seed = random.randrange(2**31) if chosen.seed is None else chosen.seed
    began = time.monotonic()
    try:
        while True:
            unfinished = [kind for kind in places if record.grants(kind.engine) < chosen.grants]
            if not unfinished or (chosen.seconds is not None and time.monotonic() - began > chosen.seconds):
                break
            # Choose the place with the fewest grants so far.
            place = min(unfinished, key=lambda kind: record.nights(kind.name))
            folder = Path(tempfile.mkdtemp(prefix="sqlsem-soak-"))
            folder.chmod(0o755)
            print(f"{place.name}, seed {seed}, in {folder}", flush=True)
            result = night.run(place, folder / "night", chosen.night, seed, pace)
            record.add(result)
            if result.findings:
                print(f"  FOUND {len(result.findings)}: {result.findings[0][:2000]}", flush=True)
            else:
                folder.rmdir()
            print(f"  {result.grants:,} grants, {dict(result.faults)}", flush=True)
            seed += 10**6
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {chosen.record}")
    print(record.report())
    return 1 if record.findings else 0


if __name__ == "__main__":
    sys.exit(main())
