"""Errors of this package, by who can fix them. Imports nothing of ours."""


class Error(Exception):
    """Base of the errors this package raises on purpose."""


class RegistrationError(Error):
    """An environment id is registered twice, or what is registered cannot make an environment."""


class TaskError(Error, AssertionError):
    """A dataset row lacks a field or misuses one. The text names the field, its value and the rule.

    An AssertionError too, because that is what older releases raised.
    """


class InfraError(Error):
    """Failure of a service that the episode needs: a server, a sandbox, a database, a judge.

    It says nothing about what the model did. Graders return it as a value and environments raise it; whoever runs the
    episode tries again or leaves the episode out, and never scores it 0.
    """
