"""What all tests share: Hypothesis without a time limit per example, since machines differ."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tokenflow", deadline=None)
settings.load_profile("tokenflow")
