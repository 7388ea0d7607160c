"""Ways to get the bytes of a version. A transport moves bytes; it knows nothing of models and verifies nothing."""
