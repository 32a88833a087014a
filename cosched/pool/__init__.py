"""The offline requests that wait, in prefix order."""
