"""How a plan is made: the ledger of an iteration, the builder, the check."""
