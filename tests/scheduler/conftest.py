"""Hypothesis settings of this folder: no deadline per example, the machine may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("scheduler", deadline=None)
settings.load_profile("scheduler")
