"""Trainers and configs for Python scripts, with the names and arguments people know from TRL."""
