"""The APIs through which a load can be sent."""

from __future__ import annotations

from collections.abc import Mapping

PATHS: Mapping[str, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
"""Path by the name of the endpoint: OpenAI's three, and Anthropic's."""
