"""Our extension of a vLLM server, through vLLM's extension points: endpoint plugin and weight transfer.

`routes` runs in the API process, `worker` in the workers; `wire` needs no vLLM.
"""
