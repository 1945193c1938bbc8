"""Small tools that every part of the package uses."""
