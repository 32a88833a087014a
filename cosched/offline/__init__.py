"""The offline pool: which waiting offline request is taken next."""
