"""Checks of a data folder."""
