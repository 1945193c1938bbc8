"""The page of ``ambiseg view``: readers, saved and new predictions, looked at in a browser of the same machine."""
