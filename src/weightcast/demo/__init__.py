"""Demonstrations that a newcomer runs first."""
