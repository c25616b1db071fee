"""The parts of the scripts that belong to each feature; see `sqlsem.sql.features`."""

import re

import pytest
from support.parts import made_and_named

from sqlsem import sql
from sqlsem.sql import features
from sqlsem.values.errors import ConfigurationError

SERVERS = ("mssql", "postgresql")
SINGLE = [features.chosen([name]) for name in features.FEATURES]
TABLE = re.compile(r"^CREATE TABLE sqlsem\.(\w+)", re.MULTILINE)


def tables(engine: str, names: frozenset[str]) -> set[str]:
    return set(TABLE.findall(sql.script(engine, "schema", features=names)))


@pytest.mark.parametrize("engine", SERVERS)
def test_schema_parts_add_up_to_the_whole(engine: str) -> None:
    """Each feature's tables are in its own part of the script alone, and all parts are the whole."""
    parts = [tables(engine, frozenset({name})) for name in features.FEATURES]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert set().union(*parts) == tables(engine, sql.ALL)


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("names", SINGLE, ids=features.listed)
def test_schema_of_a_feature_has_no_other_tables(engine: str, names: frozenset[str]) -> None:
    """A part names no table that is not in it or in the parts that it needs."""
    text = re.sub(r"--[^\n]*", "", sql.script(engine, "schema", features=names))
    others = tables(engine, sql.ALL) - tables(engine, names)
    assert not others & set(re.findall(r"sqlsem\.(\w+)", text))


@pytest.mark.parametrize("name", [name for name in sql.SCRIPTS if name != "schema"])
@pytest.mark.parametrize("engine", SERVERS)
def test_marks_of_sections_are_right_and_not_printed(engine: str, name: str) -> None:
    assert "-- feature" not in sql.script(engine, name)


def test_chosen_features_bring_the_features_that_they_need() -> None:
    assert features.chosen(["queue"]) == {"locks", "queue", "rates"}
    assert features.chosen(["all"]) == sql.ALL
    with pytest.raises(ConfigurationError, match="no feature 'cue'; features: locks, operate"):
        features.chosen(["cue"])


@pytest.mark.parametrize("names", [*SINGLE, sql.ALL], ids=features.listed)
def test_setting_names_the_features(names: frozenset[str]) -> None:
    assert features.from_setting(features.to_setting(names)) == names


@pytest.mark.parametrize(
    "text",
    [
        "-- feature: queue\n",
        "-- feature: queue\n-- end of feature: rates\n",
        "-- feature: cue\n-- end of feature: cue\n",
    ],
)
def test_wrong_marks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="feature"):
        features.compose(text, sql.ALL)


def test_sections_may_be_nested() -> None:
    text = "a\n-- feature: queue\nb\n  -- feature: rates\nc\n  -- end of feature: rates\n-- end of feature: queue\nd\n"
    assert features.compose(text, {"locks", "queue"}) == "a\nb\nd\n"
    assert features.compose(text, {"locks", "rates"}) == "a\nd\n"
    assert features.compose(text, {"locks", "queue", "rates"}) == "a\nb\nc\nd\n"


# -- what a part of the features refers to --------------------------------------------------------------------------

SUBSETS = [
    *SINGLE,
    *(
        features.chosen([feature, other])
        for feature in features.FEATURES
        for other in features.FEATURES
        if feature < other
    ),
]


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("names", SUBSETS, ids=features.listed)
def test_scripts_of_features_name_nothing_else(engine: str, names: frozenset[str]) -> None:
    """Installed objects refer to no object of a feature that is not installed."""
    everything, _ = made_and_named(engine, sql.ALL)
    created, named = made_and_named(engine, names)
    assert named & (everything - created) == set()


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("name", sorted(set(features.FEATURES) - {features.CORE}))
def test_each_feature_has_something_of_its_own(engine: str, name: str) -> None:
    everything, _ = made_and_named(engine, sql.ALL)
    without, named = made_and_named(engine, sql.ALL - {name})
    assert everything - without
    if name == "rates":  # the search for missing names finds them
        assert named & (everything - without) >= {"take_tokens"}
