"""A file of requests in, a file of answers out: the client side of batches."""
