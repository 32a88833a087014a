"""Experiments in virtual time and on live servers.

The virtual engine, its clients and settings (3,300 lines), cost models of GPUs (1,500), metrics and
plots (2,200), suites and commands (3,100), live runs and profiles (1,100).
"""
