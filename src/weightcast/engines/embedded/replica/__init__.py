"""The front end's side of a replica: starts its ranks, talks to them, notices when one is gone, starts them again."""
