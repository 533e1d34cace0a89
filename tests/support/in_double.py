"""Makes transformers compute in fp64."""

import torch
from torch.overrides import TorchFunctionMode


class InDouble(TorchFunctionMode):
    """Replaces fp32 by fp64, because norms, routers and rotary embeddings request fp32 in every dtype."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*(torch.float64 if value is torch.float32 else value for value in args), **kwargs)
