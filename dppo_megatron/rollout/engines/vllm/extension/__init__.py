"""Extend a vLLM server through two extension points: endpoint plug-in and weight transfer.

`routes` runs in the API process, `worker` in the workers; `wire` needs no vLLM.
"""
