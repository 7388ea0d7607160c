"""The worker processes of a replica: one for each rank."""
