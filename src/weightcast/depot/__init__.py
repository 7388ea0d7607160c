"""Depots: processes that serve versions to other hosts, over HTTP and NIXL."""
