"""What stands before the engine: run, guard."""
