"""Finding out what a leader is worth: traces, replay in simulated time, and the best that was possible."""
