"""Tenant and service of a request."""

from starlette.requests import Request

from tx.tinker.service.service import TinkerService

TENANT = "tx.tenant"
"""Key of the tenant's name in a request's scope, set by `auth`."""
IS_ADMIN = "tx.is_admin"
"""Beside it, whether the key sees what concerns all tenants."""


def get_tenant(request: Request) -> str:
    return request.scope[TENANT]


def is_admin(request: Request) -> bool:
    return request.scope[IS_ADMIN]


def get_service(request: Request) -> TinkerService:
    return request.app.state.service
