"""BROS and its baseline."""
