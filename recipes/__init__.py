"""Recipes: a YAML front door each, and the room behind it."""
