"""HTTP in and out of one replica."""
