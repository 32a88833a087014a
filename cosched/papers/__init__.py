"""HyGen, Echo, BROS and EcoServe, complete: their policies, baselines and what only they use."""
