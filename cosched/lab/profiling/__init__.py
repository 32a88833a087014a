"""Measuring engines: designed batches, run and timed."""
