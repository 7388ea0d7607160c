"""`nixl://`: one-sided reads from the registered memory of a depot or of a trainer."""
