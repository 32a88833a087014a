"""Kernel tables, as for the cost models."""

from tests.lab.cost_models.conftest import real_tables, table_dir, toy

__all__ = ["real_tables", "table_dir", "toy"]
