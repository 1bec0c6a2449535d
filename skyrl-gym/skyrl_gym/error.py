"""Exceptions of this package, grouped by who can fix them. Imports no other module of the package."""


class Error(Exception):
    """Base class of the exceptions of this package."""


class RegistrationError(Error):
    """An environment id is registered twice, or the registration cannot make an environment."""


class TaskError(Error, AssertionError):
    """A dataset row lacks a field or misuses one. The text names the field, its value and the rule.

    An AssertionError too, because that is what older releases raised.
    """


class InfraError(Error):
    """Failure of a service that the episode requires: a server, a sandbox, a database, a judge.

    It is unrelated to the model's behaviour. Graders return it as a value and environments raise it; the caller retries
    or excludes the episode, and never scores it 0.
    """
