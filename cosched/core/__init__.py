"""Immutable data shared by every layer: requests, views, plans, limits. Standard library only."""
