"""What the ranks of a tensor-parallel group have to agree on: they must form the same batch."""

from __future__ import annotations

from typing import Any

from sglang_ext.sglang import current


def agree(scheduler: Any, values: list[int]) -> list[int]:
    """The smallest of each value over the ranks that must form the same batch.

    A collective: every rank has to call it in the same step with as many values.
    """
    if not values or current().parallel(scheduler).attention_tensor == 1:
        return values
    import torch

    tensor = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(
        tensor, op=torch.distributed.ReduceOp.MIN, group=scheduler.attn_tp_cpu_group
    )
    agreed: list[int] = tensor.tolist()
    return agreed
