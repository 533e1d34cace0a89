"""What looks at runs from outside: a page, studies of many runs, and certificates. Only `cli` imports it."""
