"""Jobs: a JSONL file of requests in, a JSONL file of answers out, all of it offline work."""
