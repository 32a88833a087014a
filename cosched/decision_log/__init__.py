"""Reading decision logs: the story of a request, a summary (docs/decision_log.md)."""
