"""What the campaigns of faults have in common: how a command is run and watched, and what it may not do.

``judge.py`` decides, ``run.py`` runs a command in a folder of its own, ``corpus.py`` makes whole files of every kind,
``mutate.py`` and ``formats.py`` damage them, ``families.py`` says which command is given which of them.
"""
