"""What offline work costs the online requests beside it, measured and drawn, policy by policy."""
