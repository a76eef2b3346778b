"""Engines: the door they come in through, and the ones that ship."""
