"""HyGen and its baselines."""
