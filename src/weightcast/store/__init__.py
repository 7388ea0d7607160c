"""Versions at rest: write aside, seal, open, prune; and the legacy file layout."""
