"""Draws scenes and their questions, trains the demo model on them from scratch and scores it."""
