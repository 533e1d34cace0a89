"""A user's reward by dotted path: something a random policy does now and then."""


def even_digits(prompt, response_text: str) -> float:
    return sum(c in "02468" for c in response_text) / 4


even_digits.trusted = True
