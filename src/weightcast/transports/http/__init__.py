"""`http://`: versions from depots, in ranges over several connections."""
