"""What a request may be: bounds for every field, checked in front of the scheduler."""
