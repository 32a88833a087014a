"""KV memory that knows classes and the future: what of it is worth keeping, and for whom."""
