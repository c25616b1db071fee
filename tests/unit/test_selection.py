"""tests/selection.py: the default run and the rest are the whole, and no fast function is left out."""

import re
from collections import Counter
from pathlib import Path

import pytest
import selection
from hypothesis import given
from hypothesis import strategies as st
from selection import BUSIEST, BUSY, NIGHTLY, NOTICED, SLOW, Case, Cost, chosen, in_shard, shard

TESTS = Path(__file__).resolve().parents[1]
#: The names of functions, classes and variables.
NAMED = re.compile(r"^ *(?:(?:async )?def |class |(?=\w+(?:: [^=\n]+)? = ))(\w+)", re.MULTILINE)


def cases_of(function, engines=(None,), faces=(None,), variants=("",), **more):
    return [
        Case(f"{function}[{engine}-{face}-{variant}]", function, engine, face, variant, **more)
        for variant in variants
        for engine in engines
        for face in faces
    ]


functions = st.builds(
    cases_of,
    st.integers(0, 10_000).map(lambda number: f"tests/unit/test_a.py::test_{number}"),
    st.sampled_from([(None,), ("sqlite",), ("postgresql",), ("sqlite", "postgresql", "memory"), ("sqlite", "mysql")]),
    st.sampled_from([(None,), ("sync",), ("sync", "aio")]),
    st.integers(1, 12).map(lambda number: tuple(map(str, range(number)))),
    sample=st.sampled_from([None, None, 3]),
    kept=st.sampled_from([False, False, False, True]),
)
tables = st.lists(functions, max_size=5, unique_by=lambda cases: cases[0].function)
times = st.builds(Cost, st.sampled_from([0.0, NOTICED, SLOW, NIGHTLY]), st.sampled_from([0.0, 0.0, BUSY, BUSIEST]))


@given(tables, st.data())
def test_default_run_and_the_rest_are_all_cases(table, data):
    cases = [case for several in table for case in several]
    costs = {several[0].function: data.draw(times) for several in table}
    default, rest = (chosen(kind, cases, costs) for kind in ("default", "rest"))
    assert default | rest == chosen("all", cases, costs) == {case.id for case in cases}
    assert not default & rest
    for several in table:
        function, taken = several[0].function, sum(case.id in default for case in several)
        if several[0].kept:
            assert taken == sum(case.engine != "mysql" for case in several)
        elif costs[function].is_nightly:
            assert taken == 0
        elif costs[function].is_slow and several[0].sample is None:
            assert taken == 1
        else:
            assert taken >= 1


def test_shards_share_out_all_cases():
    ids = [f"tests/a.py::test_{number}" for number in range(3000)]
    assert all(in_shard(id, shard("1/1")) for id in ids)
    taken = Counter(id for number in (1, 2, 3) for id in ids if in_shard(id, shard(f"{number}/3")))
    assert taken == Counter(ids)
    assert 900 < sum(in_shard(id, shard("1/3")) for id in ids) < 1100
    for wrong in ("0/2", "3/2", "1/0", "2", "a/b"):
        with pytest.raises(ValueError):
            shard(wrong)


def test_fast_function_runs_with_both_faces_and_on_each_server():
    cases = cases_of("tests/a.py::test", ("sqlite", "postgresql", "mssql"), ("sync", "aio"), "abc")
    taken = Counter((case.engine, case.face) for case in cases if case.id in chosen("default", cases, {}))
    assert taken["sqlite", "sync"] == taken["sqlite", "aio"] == 3
    assert taken["postgresql", "sync"] >= 1 <= taken["mssql", "sync"]


def test_second_engine_of_the_statements_has_few_cases():
    taken = Counter()
    for number in range(300):
        cases = cases_of(f"tests/conformance/a.py::test_{number}", ("sqlite", "mysql"), ("sync", "aio"), "abc")
        taken += Counter(
            (case.engine, case.face, case.variant) for case in cases if case.id in chosen("default", cases, {})
        )
    assert 10 < taken.pop(("mysql", "sync", "a")) < 50
    assert {engine for engine, _, _ in taken} == {"sqlite"}
    alone = cases_of("tests/mysql/a.py::test", ("mysql",), variants="abcd")
    assert alone[0].id in chosen("default", alone, {}) < {case.id for case in alone}


def test_large_table_is_sampled():
    cases = cases_of("tests/a.py::test", ("sqlite",), variants=tuple(map(str, range(400))))
    assert 60 < len(chosen("default", cases, {})) < 140
    cases = cases_of("tests/a.py::test", ("sqlite",), variants=tuple(map(str, range(400))), sample=10)
    assert 20 < len(chosen("default", cases, {})) < 70


def test_quick_run_has_a_case_of_each_fast_function():
    cases = cases_of("tests/unit/a.py::test", ("sqlite", "memory"), ("sync", "aio"), "abc")
    cases += cases_of("tests/unit/a.py::test_slow") + cases_of("tests/faults/a.py::test")
    assert chosen("quick", cases, {"tests/unit/a.py::test_slow": Cost(NOTICED)}) == {cases[0].id}


def test_durations_are_of_existing_functions():
    """After a rename, change the name in durations.txt as well, or delete the line."""
    known, missing = {}, []
    for function in selection.read_durations():
        path, *names = function.split("::")
        if path not in known:
            file = TESTS.parent / path
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            known[path] = set(NAMED.findall(text))
        if not set(names) <= known[path]:
            missing.append(function)
    assert missing == []


def test_recorder_keeps_entries_of_other_functions(tmp_path):
    file = tmp_path / "durations.txt"
    slow = [Cost(1.0, 0.1), Cost(3.0, 0.3), Cost(2.0, 0.7)]
    selection.write_durations({"a.py::test_slow": slow, "a.py::test_fast": [Cost(0.1)]}, file)
    selection.write_durations({"b.py::test": [Cost(0.6)]}, file)
    assert selection.read_durations(file) == {"a.py::test_slow": Cost(2.0, 0.3), "b.py::test": Cost(0.6)}
    selection.write_durations({"a.py::test_slow": [Cost(0.1)]}, file)
    assert selection.read_durations(file) == {"b.py::test": Cost(0.6)}
