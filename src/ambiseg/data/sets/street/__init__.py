"""Street scenes whose modes and probabilities are known."""
