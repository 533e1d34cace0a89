"""Our extension of a vLLM server, through its own extension points: endpoint plugin and weight transfer.

`routes` runs in the API process, `worker` in the workers; `wire` needs no vLLM.
"""
