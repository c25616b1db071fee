"""The checks, in groups; importing this registers all of them (`sqlsem.ops.certify.registry.CHECKS`)."""

from __future__ import annotations

from sqlsem.ops.certify.checks import calling, hammering, installing, living, measuring

__all__ = ["calling", "hammering", "installing", "living", "measuring"]
