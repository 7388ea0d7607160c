"""The ways in which staged tensors become live ones, and how each is undone."""
