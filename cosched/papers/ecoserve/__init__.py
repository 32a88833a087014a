"""EcoServe and its baselines."""
