"""Runs in virtual time: a machine, clients, scenarios, and what comes out."""
