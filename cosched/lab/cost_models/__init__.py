"""What an iteration takes: the ground truth of the virtual clock, from kernel tables or a roofline
(docs/simulation.md)."""
