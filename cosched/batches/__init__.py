"""OpenAI's Files and Batches on the server itself: a durable store, its routes, and the feeder."""
