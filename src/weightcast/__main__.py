"""`python -m weightcast`."""

from weightcast.cli.main import run

run()
