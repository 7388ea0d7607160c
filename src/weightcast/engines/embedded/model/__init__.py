"""The model in torch: Qwen3 and Qwen3-MoE, divided over the ranks."""
