"""Check the specifications, and that each of their properties can fail.

    python proof/check.py                all of it (some minutes)
    python proof/check.py Queues Rates    of these modules
    python proof/check.py --table        … and print the table of proof/README.md
    python proof/check.py --simulate     the larger bounds, at random (as long as you let it)

Each check is a configuration with some of its constants replaced. If ``Mutant`` names a step that is left out, TLC must
find a violated property: a property that no mutant violates proves nothing. The exit code is 1 if the result of a check
is not the expected one.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proof import tlc

__all__ = ["CHECKS", "Check", "carry_out"]


@dataclass(frozen=True)
class Check:
    """A configuration, its replaced constants, and the result that TLC must find: '' for no violation."""

    module: str
    config: str
    finds: tuple[str, ...] = ()  # one of them
    constants: dict[str, str] = field(default_factory=dict)
    words: str = ""  # the step that is left out, or the subject

    @property
    def name(self) -> str:
        """The text for readers."""
        values = ", ".join(f"{name} = {value}" for name, value in self.constants.items())
        return f"{self.config}: {values}" if values else self.config

    def text(self) -> str:
        """Return the text of the configuration."""
        text = (tlc.FOLDER / f"{self.config}.cfg").read_text(encoding="utf-8")
        for name, value in self.constants.items():
            sign = "<-" if value.isidentifier() and value not in ("TRUE", "FALSE") else "="
            text, count = re.subn(rf"(?m)^(    {name}) (?:=|<-) .*$", rf"\1 {sign} {value}", text)
            if count != 1:
                raise ValueError(f"{self.config}.cfg has no constant {name}")
        return text


def _mutant(module: str, config: str, name: str, finds: str, words: str, **constants: str) -> Check:
    return Check(module, config, tuple(finds.split()), {"Mutant": f'"{name}"', **constants}, words)


#: Of Queue.tla: one process among any others.
ONE = {"Requester": "{a}", "AnyTurn": "TRUE", "AtOnce": "TRUE", "MaxRequests": "2"}
CHECKS = (
    Check("Ungated", "Gated", words="the three statements that sqlsem began with, and a gate"),
    Check("Ungated", "Ungated", ("Alone",), words="the three statements that sqlsem began with"),
    # The rule, the gate, polls, grants, upgrades.
    Check("MCQueues", "Queues", words="three readers and writers of one resource"),
    Check("MCQueues", "Queues", constants={"Request": "Limits"}, words="three that share a limit, with weights"),
    Check(
        "MCQueues",
        "Queues",
        constants={"Request": "Both", "MaxFaults": "2"},
        words="three, two resources, two faults",
    ),
    Check("MCQueues", "QueuesServed", words="each living waiter is granted: two readers and writers"),
    _mutant("MCQueues", "Queues", "no gate", "InOrder SafeRows", "a registration does not take the gate"),
    _mutant(
        "MCQueues",
        "Queues",
        "barging",
        "Ordered",
        "waiters are overtaken",
        Request="Limits",
    ),
    _mutant("MCQueues", "Queues", "weights", "SafeRows", "rows count instead of their weights", Request="Limits"),
    _mutant(
        "MCQueues",
        "Queues",
        "others limit",
        "SafeRows Ordered",
        "the limits of other rows do not count",
        Request="Limits",
    ),
    _mutant("MCQueues", "Queues", "stages mix", "SafeRows", "different labels share", Request="Stages"),
    _mutant("MCQueues", "Queues", "past readers", "SafeRows", "an upgrade checks only the rows ahead"),
    _mutant("MCQueues", "Queues", "two upgraders", "SafeRows Ordered", "two readers upgrade at once"),
    _mutant(
        "MCQueues",
        "Queues",
        "readers behind",
        "SafeRows",
        "readers behind that fit are not granted",
    ),
    _mutant(
        "MCQueues",
        "Queues",
        "unlocked",
        "SafeRows",
        "the row that blocks a reader behind leaves meanwhile",
    ),
    _mutant("MCQueues", "QueuesServed", "the dead stay", "time", "dead members are not removed"),
    # Hand-overs.
    Check("MCHandOver", "HandOver", words="a giver, two others with the token"),
    _mutant("MCHandOver", "HandOver", "giver goes on", "OneWorks", "the giver works until it has its answer"),
    _mutant(
        "MCHandOver",
        "HandOver",
        "token used twice",
        "OneWorks LoserKnows UsedOnce",
        "the token is not checked for use",
    ),
    _mutant("MCHandOver", "HandOver", "another number", "OneWorks", "the adopter's row has a number of its own"),
    _mutant(
        "MCHandOver",
        "HandOver",
        "release by position",
        "LoserKnows OneWorks",
        "a late release removes any owner's row",
    ),
    _mutant("MCHandOver", "HandOver", "no lease", "time", "the lease in transit has no end"),
    # Rates.
    Check("MCRates", "Rates", words="two processes, a clock that may go back"),
    _mutant("MCRates", "Rates", "no gate", "NeverMore", "two read at the same time, and then take"),
    _mutant("MCRates", "Rates", "slot ends early", "NeverMore", "a slot counts until its beginning is over"),
    _mutant("MCRates", "Rates", "fixed windows", "NeverMore", "each window begins empty"),
    _mutant("MCRates", "Rates", "bucket", "NeverMore", "a leaking bucket, as large as the limit"),
    _mutant(
        "MCRates",
        "Rates",
        "future forgotten",
        "NeverMore",
        "use in the future is dropped",
    ),
    _mutant("MCRates", "Rates", "barging", "InTurn", "a request that is not first in the queue takes"),
    # Dead members, and how a holder learns of its loss, in time.
    Check("MCQueue", "Queue", words="two processes, one mutex, one fault; registrations taken apart"),
    Check(
        "MCQueue",
        "Queue",
        constants={"Request": "Two", "AtOnce": "TRUE"},
        words="two processes, two resources, one fault",
    ),
    Check(
        "MCQueue",
        "Queue",
        constants={**ONE, "Grace": "3", "MaxFaults": "4"},
        words="one of any number of processes, twice, four faults; its turn comes at any time",
    ),
    Check(
        "MCQueue",
        "Queue",
        constants={**ONE, "Grace": "3", "MaxFaults": "3", "Leased": "{a}"},
        words="the same for one with a lease, three faults",
    ),
    _mutant("MCQueue", "Queue", "no gate", "InOrder", "a registration does not take the gate"),
    *(
        _mutant("MCQueue", "Queue", name, finds, words, **ONE, MaxFaults="2")
        for name, finds, words in (
            ("no grace", "LivingAlone", "a missing member is removed at once"),
            ("removed untested", "LivingAlone", "a member found missing is removed without a second test"),
            ("same beacon", "LivingAlone LoserKnows", "a returning member has the beacon that was found missing"),
            ("no new life", "LoserKnows LivingAlone", "after a restart heartbeats count, of which some are lost"),
            ("no watch", "LoserKnows", "the watchdog does not read the clock"),
            ("proof at its end", "LoserKnows", "a ping proves the instant of its answer"),
            ("answer at its end", "LoserKnows", "a grant proves the instant of its answer"),
            ("grant unheard", "LoserKnows", "a ping marks only known grants lost"),
            ("back and well", "LoserKnows", "a return proves that the held rows are still there"),
            ("repeated and revoked", "LoserKnows", "a repeated call finds its grant, though it was revoked"),
        )
    ),
    Check(
        "MCQueue",
        "QueueServed",
        constants={**ONE, "MaxFaults": "2"},
        words="the living are granted, the dead are removed: one of any number of processes, twice, two faults",
    ),
    _mutant("MCQueue", "QueueServed", "the dead stay", "time", "dead members are not removed", **ONE),
    # The waiters of one process.
    Check("Waiters", "Waiters", words="three waiters of a process, two rows of others, two faults"),
    _mutant("Waiters", "Waiters", "local for ever", "time", "a local wait follows another"),
    _mutant("Waiters", "Waiters", "wakes nobody", "time", "a waiter that leaves the queue does not wake the next"),
    # Tasks with locks.
    Check("MCBlocked", "BlockedSafe", words="two tasks with the same two locks, two workers"),
    Check("MCBlocked", "Blocked", words="the process behind them is granted, and every task ends"),
    _mutant(
        "MCBlocked",
        "BlockedSafe",
        "granted apart",
        "HoldsNothing",
        "single locks are granted early, and held",
    ),
    _mutant("MCBlocked", "BlockedSafe", "rows uncounted", "RunsWithAll", "the rows are not counted"),
    _mutant(
        "MCBlocked",
        "BlockedSafe",
        "ended by the dead",
        "EndsItsOwn",
        "the attempt of another worker is ended",
    ),
    _mutant(
        "MCBlocked",
        "BlockedSafe",
        "locks kept",
        "HoldsNothing",
        "a failed attempt keeps its locks for the retry",
    ),
    _mutant(
        "MCBlocked",
        "BlockedSafe",
        "rows stay",
        "HoldsNothing",
        "the rows of the dead stay",
    ),
    _mutant("MCBlocked", "Blocked", "asked apart", "time", "rows are inserted into one queue after the other"),
    _mutant("MCBlocked", "Blocked", "no lease", "time", "blocked tasks' rows have no end if no worker claims"),
)
#: Larger bounds, at random: a configuration of each module.
LARGE = (
    Check("MCQueues", "Queues", constants={"Request": "Both", "MaxRequests": "2", "MaxFaults": "2"}),
    Check("MCHandOver", "HandOver", constants={"Ttl": "4", "MaxFaults": "4"}),
    Check("MCRates", "Rates", constants={"MaxTime": "16", "MaxTakes": "8", "Limit": "3", "MaxFaults": "2"}),
    Check("MCBlocked", "BlockedSafe", constants={"MaxAttempts": "6", "MaxFaults": "6"}),
    Check(
        "MCQueue",
        "Queue",
        constants={"Requester": "{a, b, c}", "Request": "Two", "MaxRequests": "2", "MaxFaults": "2"},
    ),
)


def carry_out(check: Check, *, seconds: float = 600, simulate: int | None = None) -> tuple[bool, tlc.Outcome]:
    """Return True if the result is the expected one, and TLC's result."""
    outcome = tlc.run(check.module, check.text(), seconds=seconds, simulate=simulate)
    if not check.finds:
        return not outcome.violated, outcome
    return any(name in outcome.violated for name in check.finds), outcome


def _print_table(lines: Iterable[tuple[Check, tlc.Outcome]]) -> None:
    print("| check | about | found | states |\n|---|---|---|---|")
    for check, outcome in lines:
        print(f"| `{check.name}` | {check.words} | {outcome.violated or 'nothing'} | {outcome.states:,} |")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="of these: Queues, Queue, HandOver, Rates, Blocked")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--behaviours", type=int, default=10_000, help="with --simulate: so many")
    parser.add_argument("--seconds", type=float, default=3600, help="no longer for one check")
    options = parser.parse_args(arguments)
    done, failed = [], 0
    for check in LARGE if options.simulate else CHECKS:
        if (
            options.modules
            and check.config not in options.modules
            and check.module.removeprefix("MC") not in options.modules
        ):
            continue
        good, outcome = carry_out(
            check, seconds=options.seconds, simulate=options.behaviours if options.simulate else None
        )
        failed += not good
        done.append((check, outcome))
        print(
            f"{'ok ' if good else 'NOT'} {check.name}: {outcome.violated or 'nothing'} found, "
            f"{outcome.states:,} states, {outcome.seconds:.0f} s",
            flush=True,
        )
    if options.table:
        _print_table(done)
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
