"""Models as sets of slots. A target only writes tensors into a model."""
