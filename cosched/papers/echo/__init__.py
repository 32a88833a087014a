"""Echo."""
