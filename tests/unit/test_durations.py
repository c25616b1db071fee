"""One kind of duration everywhere: seconds, text, `timedelta`."""

import asyncio
from datetime import timedelta

import pytest

import sqlsem
from sqlsem.values.locks import check_duration

HOUR = [3600, 3600.0, "3600", "3600s", "60m", "1h", "0.5h30m", timedelta(hours=1)]


@pytest.mark.parametrize("value", HOUR, ids=str)
def test_durations_are_read_alike_everywhere(coordinator, tmp_path, value):
    assert check_duration("It", value) == 3600.0
    lock = coordinator.mutex("a", timeout=value)
    assert lock.terms.timeout == 3600.0
    assert coordinator.aio.all_of(lock, coordinator.mutex("b"), timeout=value).terms.timeout == 3600.0
    assert lock.acquire(timeout=value)
    lock.release()
    with coordinator.read("a") as grant:
        grant.upgrade(timeout=value)
        grant.downgrade()
    with sqlsem.connect(tmp_path / "y.db", grace=value, lease=value, retry=value) as other:
        assert other.engine.options.grace == other.engine.options.lease == other.retry == 3600.0
    queue = coordinator.queue("q")
    queue.wait(value)
    queue.put(1, after=value)
    assert sqlsem.Worker(queue, idle_exit=value).idle_exit == 3600.0
    assert coordinator.batch("r", ["a"], window=value).window == 3600.0
    with coordinator.batch("r", ["a"], window=value).part("a"):
        pass
    assert coordinator.batch("r", ["a"], window=value).wait(value).status == "succeeded"
    coordinator.admin.set_stale_after("a", value)
    (resource,) = [item for item in coordinator.admin.resources() if item.resource == "a"]
    assert resource.stale_after == 3600.0

    async def main():
        lock = coordinator.aio.mutex("a", timeout=value)
        assert await lock.acquire(timeout=value)
        await lock.release()
        async with coordinator.read("a") as grant:
            await grant.upgrade(timeout=value)

    asyncio.run(main())


@pytest.mark.parametrize("value", ["0.05", "50ms", timedelta(milliseconds=50), 0.05], ids=str)
def test_short_timeouts_expire_everywhere(coordinator, value):
    queue = coordinator.queue("q")
    queue.put(1)
    with next(queue.claim(wait=value)):
        pass
    assert list(queue.claim(wait=value)) == []
    queue.put(1)
    with pytest.raises(sqlsem.Timeout, match=r"after 0\.05 s"):
        queue.wait(value)
    other = sqlsem.connect(coordinator.engine.path)
    with other.mutex("a"):
        assert coordinator.mutex("a").acquire(timeout=value) is False
        with pytest.raises(sqlsem.Timeout, match=r"within 0\.05 s"), coordinator.mutex("a", timeout=value):
            pass
    with other.read("a"), coordinator.read("a") as grant, pytest.raises(sqlsem.Timeout, match=r"within 0\.05 s"):
        grant.upgrade(value)
    other.close()


@pytest.mark.parametrize("value", ["", "x", "5 s", "-5", "5s5", "s", "1e3", b"5", None, True, -1, float("nan"), 1e100])
def test_invalid_duration_is_refused(coordinator, value):
    with pytest.raises(sqlsem.ConfigurationError, match="It"):
        check_duration("It", value)
    if value is not None:
        with pytest.raises(sqlsem.ConfigurationError):
            coordinator.queue("q").put(1, after=value)
        with pytest.raises(ValueError):
            coordinator.mutex("a", timeout=value)
        with pytest.raises(sqlsem.ConfigurationError):
            coordinator.queue("q").wait(value)


def test_tasks_accept_longer_times_than_locks(coordinator):
    coordinator.queue("q").put(1, after=timedelta(days=365))
    with pytest.raises(sqlsem.ConfigurationError):
        coordinator.mutex("a", timeout="365d")
