"""The endpoints, a file a family. All are thin: read, ask the desk, answer."""
