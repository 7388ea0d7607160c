"""One rank: what it holds, and how a version gets into it whole or not at all."""
