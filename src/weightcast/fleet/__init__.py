"""Driving many engines as one: stage everywhere, then commit everywhere."""
