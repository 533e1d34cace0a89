"""A calculator for one sum at a time: the policy asks `47+85?` and reads `132;`. Its last turn is the result."""

from __future__ import annotations


class Calculator:
    def reset(self, prompt, seed):
        self.right = prompt.answer
        self.said = ""

    def step(self, text):
        """Return the reply to the turn, its reward, and whether the trajectory is over."""
        self.said = text
        if not text.endswith("?"):
            return "", None, True
        a, _, b = text[:-1].partition("+")
        known = a.isdecimal() and b.isdecimal()
        return f"{int(a) + int(b)};" if known else "=;", None, False

    def reward(self):
        return float(self.said == self.right)
