"""What to compute next and which token follows. Plain data and decisions: no torch.distributed, no sockets."""
