"""Defines a user's reward, by dotted path, that a random policy sometimes gets."""


def even_digits(prompt, response_text: str) -> float:
    return sum(c in "02468" for c in response_text) / 4


even_digits.trusted = True
