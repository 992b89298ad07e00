"""What a request is told that gets no document: a status and a sentence, as RFC 9457 writes it."""

from __future__ import annotations

from typing import Any

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """A request gets no document. ``title`` names the kind, ``detail`` says what was wrong and what to do."""

    def __init__(self, status: int, title: str, detail: str, *, retry_seconds: int | None = None) -> None:
        """``retry_seconds``: when to ask again."""
        super().__init__(detail)
        self.status = status
        self.title = title
        self.detail = detail
        self.retry_seconds = retry_seconds

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}

    def headers(self) -> dict[str, str]:
        """Beside it."""
        return {} if self.retry_seconds is None else {"Retry-After": str(self.retry_seconds)}
