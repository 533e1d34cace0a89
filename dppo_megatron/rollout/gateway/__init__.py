"""Serve the user's agents over HTTP, as OpenAI (Chat Completions, Responses) and Anthropic (Messages) servers do."""

from .server import Gateway

__all__ = ["Gateway"]
