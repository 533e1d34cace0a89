"""A free reward that differs between the samples of a group, so that every sample is trained on."""


def even_length(_prompt, response_text: str) -> float:
    return float(len(response_text) % 2 == 0)
