"""Workloads: readers of public trace formats, generators, and the requests they give."""
