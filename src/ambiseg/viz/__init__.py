"""Colours, pictures and pages: everything that draws takes them from here."""
