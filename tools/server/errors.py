# SPDX-License-Identifier: Apache-2.0
"""What a client is told where its request can't be served: the API's error object."""
from __future__ import annotations

from starlette.responses import JSONResponse

INVALID = "invalid_request_error"


class ApiError(Exception):
    """An answer other than 200; kind, param and code as the API names them."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 kind: str = INVALID, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind
        self.headers = headers

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def unavailable(reason: str) -> ApiError:
    return ApiError(503, reason, kind="server_error", code="unavailable")
