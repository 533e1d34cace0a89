"""Agents of the tests: plain functions that ask for turns over HTTP."""

import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def ask(url: str, api_key: str, messages: list) -> dict:
    body = json.dumps({"messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as reply:
        return json.load(reply)["choices"][0]["message"]


def talks(url, api_key, task, turns=3, dies_in=None):
    """Echoes each turn; the reward is the number of turns. Its process ends once in this directory."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for turn in range(turns):
        messages.append(ask(url, api_key, messages))
        if turn == 1 and dies_in is not None and not os.path.exists(dies_in):
            os.mkdir(dies_in)
            os._exit(3)
        messages.append({"role": "user", "content": f"[{messages[-1]['content']}]"})
    return turns


async def unscored(url, api_key, task):
    """Leaves the reward to `reward:` of the config."""
    ask(url, api_key, [{"role": "user", "content": task["prompt"]}])


def silent(url, api_key, task):
    return 1.0


def hangs(url, api_key, task):
    talks(url, api_key, task, turns=1)
    time.sleep(60)


def endless(url, api_key, task):
    talks(url, api_key, task, turns=99)


def asks(url, api_key, task, prompts, at_once):
    """Asks each prompt, one by one or all at once; the reward is the number of answers."""

    def answered(prompt):
        try:
            ask(url, api_key, [{"role": "user", "content": prompt}])
        except urllib.error.HTTPError:
            return 0.0
        return 1.0

    with ThreadPoolExecutor(len(prompts) if at_once else 1) as threads:
        return sum(threads.map(answered, prompts))


def copes(url, api_key, task):
    """Takes a refused turn as the end."""
    try:
        endless(url, api_key, task)
    except urllib.error.HTTPError:
        return 1.0
