"""Kernel tables, as for the cost models."""
