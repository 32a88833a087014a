"""How much later online requests may be for offline work: what they would have alone, and what is
left of the share that was promised of it (docs/policies/cosched.md, tolerance mode)."""
