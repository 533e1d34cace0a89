"""A calculator for one sum at a time: the policy asks `47+85?`, reads `132;`, and says the result where it has it."""

from __future__ import annotations


class Calculator:
    def reset(self, prompt, seed):
        self.right = prompt.answer
        self.said = ""

    def step(self, text):
        """(what is said to the turn, its reward, whether the trajectory is over)"""
        self.said = text
        if not text.endswith("?"):
            return "", None, True
        a, _, b = text[:-1].partition("+")
        known = a.isdecimal() and b.isdecimal()
        return f"{int(a) + int(b)};" if known else "=;", None, False

    def reward(self):
        return float(self.said == self.right)
