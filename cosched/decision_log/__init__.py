"""Reading decision logs: stories, summaries, plans made again (docs/decision_log.md)."""
