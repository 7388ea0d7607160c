"""vLLM: versions go into running servers through its own weight-transfer seam. Importing this does not import vLLM."""
