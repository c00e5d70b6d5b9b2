"""From tokens to what a client gets: text, stop strings, log probabilities, deltas."""
