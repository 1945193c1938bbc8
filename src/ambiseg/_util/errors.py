"""Errors that the user can put right: one line each, exit code 2 on the command line."""


class DataError(ValueError):
    """Something about the data that its owner can put right; the message names the file, the expected and the found."""


class ConfigError(DataError):
    """A setting or a run that cannot be used; the message is one line that names the key or the file."""
