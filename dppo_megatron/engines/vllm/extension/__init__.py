"""Extend a vLLM server through its extension points: endpoint plugin and weight transfer.

`routes` runs in the API process, `worker` in the workers; `wire` needs no vLLM.
"""
