"""Agents of the user over HTTP, as of a server of OpenAI (Chat Completions, Responses) or Anthropic (Messages)."""

from .server import Gateway

__all__ = ["Gateway"]
