"""The embedded engine: a small, real LLM engine with tensor-parallel ranks that runs anywhere torch does."""
