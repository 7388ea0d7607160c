"""Pickled state dicts of Paddle and torch, read without running them."""
