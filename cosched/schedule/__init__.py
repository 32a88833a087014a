"""The plan of each iteration: what fits, what online requests need, which offline work fills it."""
