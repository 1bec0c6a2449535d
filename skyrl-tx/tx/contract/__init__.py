"""Former name of `tx.conformance`, kept as a command."""
