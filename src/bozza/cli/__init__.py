"""The command line."""

from bozza.cli.app import main

__all__ = ["main"]
