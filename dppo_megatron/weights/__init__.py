"""A published policy on disk and on its way: the code that trainer and engines share."""
