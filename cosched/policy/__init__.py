"""Policies: pure functions from a view to a plan."""
