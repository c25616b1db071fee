"""Signatures of the public API: each names its keywords, so that editors complete them."""

import inspect
from datetime import timedelta

import pytest

import sqlsem
import sqlsem.aio
import sqlsem.testing
from sqlsem.client import options
from sqlsem.client.options import DEFAULTS, OTHER_DEFAULTS
from sqlsem.client.options import __all__ as option_names
from sqlsem.tasks import check_put

MODULES = (sqlsem, sqlsem.aio, sqlsem.testing)


def public_callables():
    """Each public function, class and public method, once."""
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isroutine(value):
                yield pytest.param(value, id=f"{module.__name__}.{name}")
            if inspect.isclass(value) and not issubclass(value, BaseException):
                for member, method in inspect.getmembers(value, inspect.isfunction):
                    if not member.startswith("_"):
                        yield pytest.param(method, id=f"{module.__name__}.{name}.{member}")


@pytest.mark.parametrize("function", list(public_callables()))
def test_signature_names_all_keywords(function):
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_signature_of_mutex_lists_its_options():
    expected = ["name", "timeout", "reentrant", "on_lost", "cancel_on_lost", "note", "priority", "coordinator"]
    for module in (sqlsem, sqlsem.aio):
        assert list(inspect.signature(module.mutex).parameters) == expected
    with sqlsem.testing.memory() as locks:
        for api in (locks, locks.aio):
            assert list(inspect.signature(api.mutex).parameters) == expected[:-1]


def test_signature_binds_a_call_as_the_function_does():
    bound = inspect.signature(sqlsem.limit).bind("etl", 3, weight=2, timeout=timedelta(seconds=1))
    assert bound.arguments == {"name": "etl", "limit": 3, "weight": 2, "timeout": timedelta(seconds=1)}
    with pytest.raises(TypeError, match="timout"):
        inspect.signature(sqlsem.limit).bind("etl", 3, timout=5)


def test_signature_defaults_match_the_call():
    with sqlsem.testing.memory() as locks:
        for make in (locks.mutex, locks.read, locks.write):
            defaults = {
                name: parameter.default
                for name, parameter in inspect.signature(make).parameters.items()
                if name != "name"
            }
            assert vars(make("a", **defaults).terms).keys() == vars(make("a").terms).keys()
            assert repr(make("a", **defaults)) == repr(make("a"))
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(sqlsem.connect).parameters.items()
        if name != "url"
    }
    constructor = inspect.signature(sqlsem.Coordinator.__init__).parameters
    assert defaults == {name: constructor[name].default for name in defaults}
    shown, checked = (inspect.signature(call).parameters for call in (sqlsem.Queue.put, check_put))
    assert {name: shown[name].default for name in checked} == {name: checked[name].default for name in checked}


def test_defaults_are_of_options():
    classes = {name: getattr(options, name) for name in option_names if name.endswith("Options")}
    known = {name for cls in classes.values() for name in cls.__annotations__}
    assert set(DEFAULTS) <= known
    assert all(name in classes[cls].__annotations__ for cls, name in OTHER_DEFAULTS)


@pytest.mark.parametrize("call", ["sqlsem.mutex('a', ", "sqlsem.aio.limit('a', 2, ", "locks.read('a', "])
def test_jedi_completes_the_keywords(call):
    jedi = pytest.importorskip("jedi")
    with sqlsem.testing.memory() as locks:
        names = {
            completion.name for completion in jedi.Interpreter(call, [{"sqlsem": sqlsem, "locks": locks}]).complete()
        }
    assert {"timeout=", "note=", "reentrant=", "on_lost="} <= names
