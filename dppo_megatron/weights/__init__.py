"""Policy weights on disk and in transfer: the code that trainer and engines share."""
