"""The task of django-tasks-db, which must be in a module, and can be defined only after Django has its settings."""

from __future__ import annotations

from benchmarks.queues import note

try:
    from django.tasks import task
except ImportError:  # before Django 6
    from django_tasks import task


@task()  # type: ignore[untyped-decorator]
def note_task(number: int) -> None:
    """Count a task."""
    note(number)
