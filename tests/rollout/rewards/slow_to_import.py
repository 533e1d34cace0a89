"""A reward in a module that takes longer to import than its timeout."""

import time

time.sleep(1.5)


def one(prompt, response_text):
    return 1
