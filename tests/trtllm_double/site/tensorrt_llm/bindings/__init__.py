"""Holds `executor` only."""
