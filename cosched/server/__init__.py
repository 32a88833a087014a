"""The HTTP side: class and targets of a request, checks, the operator's requests, shutdown."""
