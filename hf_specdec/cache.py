"""Cache: the target's keys and values, appended in place, and cut back in place to the accepted path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
)


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer: the first `length` rows of a longer buffer."""

    is_croppable = True
    is_sliding = False

    def __init__(self, cache: TreeCache):
        super().__init__()
        self.cache = cache
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.key_rows = self.cache.allocate(key_states)  # [batch, heads, capacity, dim]
        self.value_rows = self.cache.allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the block behind the rows kept so far and returns views of all rows, nothing copied."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        if self.length > self.cache.capacity:
            self.cache.grow(self.length)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.key_rows[:, :, start : self.length] = key_states
        self.value_rows[:, :, start : self.length] = value_states
        return self.keys, self.values

    @property
    def keys(self) -> torch.Tensor | None:
        return self.key_rows[:, :, : self.length] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        return self.value_rows[:, :, : self.length] if self.is_initialized else None

    @keys.setter
    def keys(self, rows: None) -> None:  # the base class's constructor sets both to None
        assert rows is None

    @values.setter
    def values(self, rows: None) -> None:
        assert rows is None

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)


class TreeCache(Cache):
    """Keys and values allocated once for a whole call; a step appends its block and keeps the accepted rows of it.

    Rows of the layers share one buffer per shape and device, so that keeping a path is one gather for the whole model.

    Args:
        num_layers (`int`): layers of the model.
        capacity (`int`): rows to allocate, at least 1; the buffers grow by half (one copy) should this not be enough.
        single_device (`bool`): whether all layers live on one device, and so may share one allocation.
    """

    tree_capable = True

    def __init__(self, num_layers: int, *, capacity: int, single_device: bool = True):
        self.capacity = -(-capacity // 16) * 16
        self.single_device = single_device
        self.buffers: list[torch.Tensor] = []  # each [slots, batch, heads, capacity, dim]
        self.used_slots: list[int] = []
        super().__init__(layers=[TreeLayer(self) for _ in range(num_layers)])

    @property
    def cache(self) -> TreeCache:
        """What the model is called with."""
        return self

    @property
    def length(self) -> int:
        return self.layers[0].length

    def allocate(self, states: torch.Tensor) -> torch.Tensor:
        """Rows for one layer's keys or values, shaped like `states` but for their number."""
        batch, heads, _, dim = states.shape
        for index, buffer in enumerate(self.buffers):
            alike = buffer.shape[1:3] == (batch, heads) and buffer.shape[-1] == dim
            alike = alike and buffer.dtype == states.dtype and buffer.device == states.device
            if alike and self.used_slots[index] < len(buffer):
                self.used_slots[index] += 1
                return buffer[self.used_slots[index] - 1]
        # a model of one shape gets all its rows at once; where shapes or devices differ, each newcomer gets its own
        slots = 2 * len(self.layers) if self.single_device and not self.buffers else 1
        self.buffers.append(states.new_empty(slots, batch, heads, self.capacity, dim))
        self.used_slots.append(1)
        return self.buffers[-1][0]

    def grow(self, length: int) -> None:
        """Makes room for `length` rows; what was written stays."""
        old, self.buffers, self.used_slots = [layer for layer in self.layers if layer.is_initialized], [], []
        self.capacity = -(-max(length, self.capacity * 3 // 2) // 16) * 16
        for layer in old:
            for name in ("key_rows", "value_rows"):
                rows = getattr(layer, name)
                setattr(layer, name, self.allocate(rows))
                getattr(layer, name)[:, :, : rows.shape[2]] = rows

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Cuts the block that begins at row `start` back to the rows of `path`, in that order, in place."""
        moved = next((i for i, node in enumerate(path) if node != i), len(path))  # rows before it are in place already
        if moved < len(path):
            for buffer in self.buffers:
                rows = torch.tensor(path[moved:], device=buffer.device) + start
                buffer[..., start + moved : start + len(path), :] = buffer.index_select(-2, rows)
        for layer in self.layers:
            layer.length = start + len(path)

    def load(self, cache: Cache) -> None:
        """Takes over what a stock cache holds."""
        length = int(cache.get_seq_length())
        if length == 0:
            return
        for layer, stock in zip(self.layers, cache.layers, strict=True):
            if stock.is_initialized:
                layer.update(stock.keys[:, :, :length], stock.values[:, :, :length])

    def store(self, cache: Cache) -> None:
        """Leaves in a stock cache exactly what plain decoding would have left there."""
        while len(cache.layers) < len(self.layers):  # a DynamicCache made without a config adds its layers lazily
            cache.layers.append(cache.layer_class_to_replicate())
        for layer, stock in zip(self.layers, cache.layers, strict=True):
            if not layer.is_initialized:
                continue
            if not stock.is_initialized:
                stock.lazy_initialization(layer.keys, layer.values)
            if isinstance(stock, StaticLayer):
                stock.keys[:, :, : layer.length] = layer.keys
                stock.values[:, :, : layer.length] = layer.values
                stock.cumulative_length.fill_(layer.length)
            else:
                stock.keys, stock.values = layer.keys, layer.values


class ChainCache:
    """A stock cache that can be cropped but not gathered (sliding window, offloaded): verifies chains only."""

    tree_capable = False

    def __init__(self, cache: Cache):
        self.cache = cache
        self.recording = False

    @property
    def length(self) -> int:
        return int(self.cache.get_seq_length())

    def keep(self, start: int, path: Sequence[int]) -> None:
        """Drops the rows behind the accepted ones; `path` must be the first rows of the block."""
        assert list(path) == list(range(len(path))), path
        if self.recording:
            rejected = self.length - (start + len(path))
            for layer in self.cache.layers:
                if layer.is_initialized:  # a layer that is skipped has no rows
                    layer.crop(-rejected)
        else:  # begins after the prefill, which would otherwise keep rows long out of the window
            self.cache.activate_past_recording()
            self.recording = True

    def store(self, cache: Cache) -> None:
        """Ends the recording of rows outside the window, which a later prefill would pay for."""
        for layer in cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


def open_cache(model, cache: Cache, *, capacity: int) -> TreeCache | ChainCache:
    """The cache to decode with, in place of the stock `cache` (which may hold an earlier turn); `store` gives it back.

    Args:
        model (`PreTrainedModel`): whose layers may lie on several devices.
        cache (`Cache`): as `generate` prepared it, or as the user passed it.
        capacity (`int`): rows that will be needed.

    Raises:
        ValueError: if neither gathering nor cropping the cache is possible; names the kind and the way out.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in cache.layers} | {type(layer) for layer in DynamicCache(config=config).layers}
    if type(cache) in (DynamicCache, StaticCache) and not cache.offloading and kinds <= {DynamicLayer, StaticLayer}:
        devices = set(getattr(model, "hf_device_map", {}).values())
        opened = TreeCache(config.num_hidden_layers, capacity=capacity, single_device=len(devices) <= 1)
        opened.load(cache)
        return opened
    if type(cache) is DynamicCache and kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return ChainCache(cache)
    layers = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no"
    raise ValueError(
        f"Speculative decoding must take rejected tokens out of the cache again, and {type(cache).__name__} with "
        f"{layers} layers cannot do that. Use the default cache, or cache_implementation='static' with full "
        "attention, or generate without candidate_generator."
    )
