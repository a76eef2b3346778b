"""The rules that ship with residency, as ordinary plugins: they come in through the public door."""
