"""A plug-in of SGLang servers: what `release_memory_occupation` gives back holds NaN afterwards, as memory of GPUs may.

Put this folder on a server's PYTHONPATH. It needs nothing of this repository.
"""


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    HookRegistry.register(f"{manager}.release_memory_occupation", forget, HookType.AFTER)


def forget(reply, manager, request):
    runner = manager.tp_worker.model_runner
    pool = runner.token_to_kv_pool
    for tensor in (*runner.model.parameters(), *pool.k_buffer, *pool.v_buffer):
        tensor.data.fill_(float("nan"))
    return reply
