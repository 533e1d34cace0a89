"""Handle policy weights on disk and in transfer, with code that trainer and engines share."""
