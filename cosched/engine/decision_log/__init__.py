"""What was decided in each iteration, and the story of one request."""
