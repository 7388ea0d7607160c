"""The trainer's side: making versions available to the engines of this host."""
