"""Colours, pictures and pages."""
