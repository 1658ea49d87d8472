"""The host tier's copies on a CPU move every layer's K and V of the asked-for tokens, both ways."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sglang_ext.cpu import host_tier
from sglang_ext.guards import PluginMismatch

LAYERS, TOKENS = 3, 10


def pool(fill: int, layout: str = "layer_first") -> SimpleNamespace:
    """K and V by layer, each token's values telling pool, layer and token apart."""
    values = np.arange(2 * LAYERS * TOKENS * 2, dtype=np.int64).reshape(2, LAYERS, TOKENS, 2)
    values = values + fill
    return SimpleNamespace(
        k_buffer=list(values[0]), v_buffer=list(values[1]), layer_num=LAYERS, layout=layout
    )


def held(buffers: SimpleNamespace) -> np.ndarray:
    return np.array([buffers.k_buffer, buffers.v_buffer])


def test_what_is_backed_up_and_loaded_elsewhere_is_the_same_in_every_layer() -> None:
    host, device = pool(10_000), pool(0)
    before, host_before = held(device).copy(), held(host).copy()
    there, here, elsewhere = np.array([7, 2]), np.array([1, 4]), np.array([9, 0])
    host_tier._back_up_all_layers(host, device, there, here, "kernel")
    assert (held(host)[:, :, there] == before[:, :, here]).all()
    untouched = [at for at in range(TOKENS) if at not in there]
    assert (held(host)[:, :, untouched] == host_before[:, :, untouched]).all()
    host_tier._load_layer(host, device, there, elsewhere, 1, "kernel")
    assert (held(device)[:, 1, elsewhere] == before[:, 1, here]).all()
    assert (held(device)[:, [0, 2]] == before[:, [0, 2]]).all()


def test_another_layout_is_refused_rather_than_copied_wrongly() -> None:
    one = np.array([1])
    with pytest.raises(PluginMismatch, match="hicache-mem-layout layer_first, not page_first"):
        host_tier._load_layer(pool(0, "page_first"), pool(0), one, one, 0, "kernel")
    with pytest.raises(PluginMismatch, match="layer_first"):
        host_tier._back_up_all_layers(pool(0, "page_first"), pool(0), one, one, "kernel")
