"""What people leave open, with the roles of those who only look."""

import contextlib

import pytest

import sqlsem
from sqlsem.insight.consequences import Action
from sqlsem.live import Live

pytestmark = pytest.mark.engines("postgresql")


@pytest.mark.parametrize(
    ("role", "rights"),
    [("sqlsem_reader", set()), ("sqlsem_operator", {"operate", "retry"})],
)
def test_rights_are_known_beforehand(login, name, role, rights):
    with contextlib.closing(login(role).coordinator(retry=1)) as coordinator:
        one = Live(coordinator, 1)
        one.first_look()
        assert one.seen.overview is not None
        assert one.seen.rights == rights
        action = Action("pause", resource=name)
        if rights:
            assert one.refusal(action) is None
            one.perform(action)
            one.perform(Action("resume", resource=name))
        else:
            with pytest.raises(sqlsem.ConfigurationError, match="add it to the role sqlsem_operator"):
                one.perform(action)
            # The database refuses it as well, whatever we believe.
            with pytest.raises(sqlsem.ConfigurationError, match="permission denied"):
                coordinator.pause(name)
        one.stop()
