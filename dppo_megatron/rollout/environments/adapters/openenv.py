"""Adapt environments on an OpenEnv server, with openenv's client."""

from __future__ import annotations

import json
from typing import Any

from dppo_megatron.rollout.environments.interface import EnvironmentFailed
from dppo_megatron.types import Prompt

from . import seed_of

_clients: dict[str, Any] = {}  # URL -> client for consecutive trajectories in this process


class OpenEnv:
    """Opens a session on the server at `url`. The server must allow `environment.workers` sessions, one per process."""

    def __init__(self, url: str, action: str | None = None, observation: str | None = None):
        """Store the settings; `reset` connects.

        action: the action field that a turn fills. With None, a turn is a whole action, as JSON.
        observation: the observation field that the policy reads. With None, it reads the whole observation, as JSON.
        """
        self._url, self._action, self._observation = url, action, observation

    def reset(self, prompt: Prompt, seed: int) -> str:
        import openenv

        if (client := _clients.get(self._url)) is not None:
            try:
                return self._begin(client, prompt, seed)
            except Exception:  # the server ended the session between requests
                self._forget()
        # The client's thread answers the server's pings while the policy is busy; the limit is environment.timeout_s.
        _clients[self._url] = openenv.GenericEnvClient(base_url=self._url, message_timeout_s=1e6).sync()
        return self._begin(_clients[self._url], prompt, seed)

    def step(self, text: str) -> tuple[str, float | None, bool]:
        action: Any = {self._action: text}
        if self._action is None:
            try:
                action = json.loads(text)
            except ValueError as error:
                return f"not JSON: {error}", 0.0, False
            if not isinstance(action, dict):
                return "expected a JSON object", 0.0, False
        try:
            result = _clients[self._url].step(action)
        except Exception as error:
            if "VALIDATION_ERROR" in str(error):  # the server rejects such an action
                return f"error: {error}", 0.0, False
            self._forget()  # a late reply would be taken as the reply to a later action
            raise
        return self._text(result.observation), result.reward, bool(result.done)

    def _begin(self, client: Any, prompt: Prompt, seed: int) -> str:
        return self._text(client.reset(seed=seed_of(prompt, seed)).observation)

    def _forget(self) -> None:
        _clients.pop(self._url).close()

    def _text(self, observation: dict[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise EnvironmentFailed("raised", f"no field {self._observation!r}; it has {', '.join(observation)}")
        return str(observation[self._observation])
