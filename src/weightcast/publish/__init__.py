"""The trainer's side: making versions available to engines, of this host and of others."""
