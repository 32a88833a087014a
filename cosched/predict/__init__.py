"""How long iterations take and how long replies get; both learn while the server runs."""
