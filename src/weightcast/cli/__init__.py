"""The command line: one file per command; parse, call, print. Nothing else in the package prints."""
