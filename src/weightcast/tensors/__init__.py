"""Tensors as the rest of the package sees them: a spec and little-endian bytes, whatever framework owns them."""
