"""Errors of the environment registry. Imports nothing of ours."""


class Error(Exception):
    """Base of the errors this package raises on purpose."""


class RegistrationError(Error):
    """An environment id is registered twice, or what is registered cannot make an environment."""
