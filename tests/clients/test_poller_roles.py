"""Views that stay open, with the roles of readers."""

import contextlib

import pytest

import sqlsem
from sqlsem.insight.consequences import Action
from sqlsem.ops.poller import Poller

pytestmark = pytest.mark.engines("postgresql")


@pytest.mark.parametrize(
    ("role", "rights"),
    [("sqlsem_reader", set()), ("sqlsem_operator", {"operate", "retry"})],
)
def test_rights_are_known_beforehand(login, name, role, rights):
    with contextlib.closing(login(role).coordinator(retry=1)) as coordinator:
        live = Poller(coordinator, 1)
        live.poll_once()
        assert live.snapshot.overview is not None
        assert live.snapshot.rights == rights
        action = Action("pause", resource=name)
        if rights:
            assert live.refusal(action) is None
            live.perform(action)
            live.perform(Action("resume", resource=name))
        else:
            with pytest.raises(sqlsem.ConfigurationError, match="add it to the role sqlsem_operator"):
                live.perform(action)
            # The database refuses it as well, whatever the client assumes.
            with pytest.raises(sqlsem.ConfigurationError, match="permission denied"):
                coordinator.admin.pause(name)
        live.stop()
