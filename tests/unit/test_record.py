"""`sqlsem.util.record`: records behave as the dataclasses that they replace."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from datetime import datetime, timezone
from typing import Any, ClassVar

import pytest

from sqlsem.util.record import AsDict, plain, record
from sqlsem.values import batches, events, locks, rates, tasks


@record
class Point:
    """A record with defaults, a derived field, and a check."""

    unit: ClassVar[str] = "m"

    x: int
    y: int = 0
    names: list[str] = dataclasses.field(default_factory=list, repr=False)
    total: int = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x")
        object.__setattr__(self, "total", self.x + self.y)


@record
class Named(Point):
    """A record that extends another one."""

    name: str = "p"


@dataclasses.dataclass(frozen=True, slots=True)
class Twin:
    """The dataclass that `Point` stands for, without the derived field."""

    x: int
    y: int = 0


def test_fields_and_defaults_equal_a_dataclass() -> None:
    point = Point(1, y=2)
    assert (point.x, point.y, point.names, point.total, Point.unit) == (1, 2, [], 3, "m")
    assert point.names is not Point(1).names
    assert [field.name for field in dataclasses.fields(Point)] == ["x", "y", "names", "total"]
    assert Point.__match_args__ == ("x", "y", "names")
    assert not hasattr(point, "__dict__")


@pytest.mark.parametrize("wrong", [(), (1, 2, [], 4), {"z": 1}])
def test_wrong_arguments_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="__init__"):
        Point(**wrong) if isinstance(wrong, dict) else Point(*wrong)  # type: ignore[misc]


def test_post_init_may_refuse_values() -> None:
    with pytest.raises(ValueError, match="x"):
        Point(-1)


def test_records_of_different_classes_differ() -> None:
    assert Point(1, 2) == Point(1, 2)
    assert Point(1, 2) != Point(1, 3)
    assert Point(1) != Named(1)
    assert Twin(1, 2) != Point(1, 2)
    assert hash(Twin(1, 2)) == hash((1, 2))


def test_hash_is_that_of_the_fields() -> None:
    @record
    class Pair:
        x: int
        y: int = 0

    assert hash(Pair(1, 2)) == hash(Twin(1, 2))
    assert len({Pair(1), Pair(1), Pair(2)}) == 2


def test_repr_names_the_fields() -> None:
    assert repr(Point(1, 2, ["a"])) == "Point(x=1, y=2, total=3)"


def test_records_cannot_be_changed() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="'x'"):
        del point.x  # type: ignore[misc]


def test_extended_record_has_the_fields_of_both() -> None:
    named = Named(1, 2, [], "q")
    assert (named.x, named.total, named.name) == (1, 3, "q")
    assert repr(named) == "Named(x=1, y=2, total=3, name='q')"


def test_copies_are_equal() -> None:
    point = Named(1, 2, ["a"], "q")
    for copied in (pickle.loads(pickle.dumps(point)), copy.copy(point), copy.deepcopy(point)):
        assert copied == point
        assert copied.total == point.total
    assert dataclasses.replace(point, y=5).total == 6
    assert dataclasses.asdict(Twin(1)) == {"x": 1, "y": 0}
    assert dataclasses.asdict(point)["name"] == "q"


def test_signature_shows_the_fields_before_the_first_instance() -> None:
    @record
    class Fresh:
        x: int
        y: str = "a"

    assert str(inspect.signature(Fresh)) == "(x: 'int', y: 'str' = 'a') -> None"


def test_methods_of_the_class_remain() -> None:
    @record
    class Own:
        x: int

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    assert (repr(Own(1)), Own(1) == Own(2), hash(Own(1))) == ("own", True, 7)


@pytest.mark.parametrize("module", [batches, events, locks, rates, tasks])
def test_values_are_records(module: object) -> None:
    """A dataclass takes several times as long to make: so much that ``import sqlsem`` would take half as long again."""
    made = [value for value in vars(module).values() if dataclasses.is_dataclass(value)]
    slow = [value for value in made if value.__dataclass_params__.frozen]  # type: ignore[union-attr]
    assert made
    assert slow == ([rates.Window] if module is rates else [])


def test_nested_records_become_json_values() -> None:
    """In lists, tuples and dictionaries, too; a record inside by its own method."""

    @record
    class Inner(AsDict):
        at: datetime

        def as_dict(self) -> dict[str, Any]:
            return {**plain(self), "own": True}

    @record
    class Outer(AsDict):
        single: Inner
        several: tuple[Inner, ...]
        named: dict[str, list[Inner]]
        none: None = None

    inner, expected = (
        Inner(datetime(2026, 1, 31, tzinfo=timezone.utc)),
        {"at": "2026-01-31T00:00:00+00:00", "own": True},
    )
    outer = {"single": expected, "several": [expected], "named": {"a": [expected]}, "none": None}
    assert Outer(inner, (inner,), {"a": [inner]}).as_dict() == outer
