"""The two-class benchmark: scenarios side by side, in virtual time or live."""
