"""A random soak of the scheduler in virtual time: ``python -m cosched.soak`` (docs/soak.md)."""
