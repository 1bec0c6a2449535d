"""The protocol's endpoints: each reads a request, asks the desk, and writes the answer."""
