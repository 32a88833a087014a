"""Runs in virtual time: machine, clients, settings, results."""
