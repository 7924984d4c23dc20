"""The KV heads of a model that is split over processes: which of them this process holds, and how it asks the others.

Under tensor parallelism each process (rank) computes attention for heads that lie next to each other, and keeps the
slots of these. Whatever looks at all heads of a layer goes through `Heads`, and nothing else waits for another process.
Without tensor parallelism every method returns what it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch import distributed as dist

from kvkeep.errors import InputError, ShapeError, UnsupportedModelError

_OTHERS = ("pp_size", "fsdp_size", "dp_replicate_size", "ep_size")
"""Other ways in which transformers splits a model, by their names in its configuration."""

_KEYS = ("k_proj", "qkv_proj", "query_key_value")
"""Projections whose output has the keys of all heads; where a plan leaves them whole, every rank has all heads."""


@dataclass(frozen=True)
class Heads:
    """The KV heads of each layer that this process holds. All ranks must call the same methods in the same order.

    Attributes:
        rank: number of this process.
        ranks: number of processes that hold heads; 1: this one holds all.
        count: KV heads of a layer over all processes; 0: not known, where one process holds all.
    """

    rank: int = 0
    ranks: int = 1
    count: int = 0

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Return the heads of a model that this process holds, as transformers noted them in its configuration.

        Args:
            config: the model's configuration.

        Raises:
            UnsupportedModelError: the model is split in a way in which kvkeep cannot follow, or its heads cannot be
                divided equally among the processes.
            InputError: the processes that the model is split over do not run.
        """
        ranks, text = _ranks(config), config.get_text_config(decoder=True)
        if ranks == 1 or not _divides(text, config.distributed_config):
            return ALONE
        count = number_of_heads(text, ranks)
        return replace(sharing(config), count=count)

    def check(self, mine: int) -> None:
        """Refuse keys of another number of heads than this process should hold. A process that holds all of them takes
        any number.

        Raises:
            ShapeError: there are other heads than this process should hold.
        """
        # where there are several ranks, `of` has set the count; only `ALONE` does not know it
        if self.ranks > 1 and mine * self.ranks != self.count:
            raise ShapeError(
                f"A layer gave keys of {mine} heads to one of {self.ranks} processes that should share {self.count} KV "
                "heads equally. kvkeep cannot follow the way in which this model is split: run it in one process."
            )

    def all(self, mine: Shaped[Tensor, "B Hk *rest"]) -> Shaped[Tensor, "B heads *rest"]:
        """Return a tensor of all heads of a layer in order, gathered from that of each process. All have one shape."""
        return mine if self.ranks == 1 else torch.cat(self._gathered(mine), dim=1)

    def all_slots(self, mine: Shaped[Tensor, "B Hk S"], empty: int | float) -> Shaped[Tensor, "B heads most"]:
        """Return a number for each slot of all heads of a layer, gathered as by `all` from the slots of each process.

        Where a process has fewer slots, empty ones are put in front: a chunk's tokens, which come last, stay in the
        same columns in all heads.

        Args:
            mine: a number for each slot of this process's heads.
            empty: the number that an added slot gets.
        """
        if self.ranks == 1:
            return mine
        most = self.most(mine.shape[-1], mine.device)
        return self.all(torch.nn.functional.pad(mine, (most - mine.shape[-1], 0), value=empty))

    def mine(self, whole: Shaped[Tensor, "B heads *rest"]) -> Shaped[Tensor, "B Hk *rest"]:
        """Return the part of a tensor of all heads that belongs to this process's heads."""
        return whole if self.ranks == 1 else whole.chunk(self.ranks, dim=1)[self.rank]

    def numbers(self, mine: int, device: torch.device) -> Int[Tensor, " heads"]:
        """Return the indices of this process's heads among all heads of a layer, with ``mine`` heads per process."""
        return torch.arange(self.rank * mine, (self.rank + 1) * mine, device=device)

    def most(self, number: int, device: torch.device) -> int:
        """Return the largest ``number`` that any process has passed; all get the same."""
        if self.ranks == 1:
            return number
        return int(torch.stack(self._gathered(torch.tensor(number, device=device))).max())

    def first(self, numbers: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return in all processes the ``numbers`` that the first one has passed; others pass any of the same shape."""
        if self.ranks > 1:
            # broadcast writes into the tensor that it is given
            numbers = numbers.clone()
            dist.broadcast(numbers, 0)
        return numbers

    def texts(self, mine: str, device: torch.device) -> list[str]:
        """Return the text that each process has passed, in the order of their ranks, in all of them.

        A text needs at least one character, and no NUL.
        """
        if self.ranks == 1:
            return [mine]
        # all processes have to send tensors of one shape: NUL fills up, and is cut off again
        raw = torch.frombuffer(bytearray(mine.encode()), dtype=torch.uint8).to(device)
        padded = torch.nn.functional.pad(raw, (0, self.most(len(raw), device) - len(raw)))
        return [bytes(text.tolist()).rstrip(b"\0").decode() for text in self._gathered(padded)]

    def alike(self, number: int, device: torch.device) -> bool:
        """Return whether all processes have passed the same number."""
        return self.ranks == 1 or len({int(rank) for rank in self._gathered(torch.tensor(number, device=device))}) == 1

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors that the processes have passed, all of one shape and dtype, in order of their ranks."""
        sent = (mine.to(torch.uint8) if mine.dtype == torch.bool else mine).contiguous()
        found = [torch.empty_like(sent) for _ in range(self.ranks)]
        dist.all_gather(found, sent)
        return [part.to(mine.dtype) for part in found]


ALONE = Heads()
"""One process holds all heads."""


def sharing(config: Any) -> Heads:
    """Return this process's rank and the number of ranks that run a model together, as `Heads` that do not count the KV
    heads; `ALONE` for one process.

    Args:
        config: the model's configuration.

    Raises:
        UnsupportedModelError: the model is split in a way in which kvkeep cannot follow.
        InputError: the processes that the model is split over do not run.
    """
    if (ranks := _ranks(config)) == 1:
        return ALONE
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != ranks:
        raise InputError(
            f"The model was loaded for {ranks} processes of tensor parallelism, and these do not run. Start "
            "them with torchrun."
        )
    return Heads(dist.get_rank(), ranks)


def _ranks(config: Any) -> int:
    """Return how many processes share a model by tensor parallelism; 1 if its plan leaves everything whole.

    Raises:
        UnsupportedModelError: the model is split in another way, alone or as well.
    """
    split = getattr(config, "distributed_config", None)
    if others := [name for name in _OTHERS if (getattr(split, name, None) or 1) > 1]:
        raise UnsupportedModelError(
            f"The model was loaded with {others[0]}={getattr(split, others[0])}. kvkeep follows tensor parallelism "
            "alone: load it with tp_size, or with a device_map."
        )
    return 1 if getattr(split, "tp_plan", None) == {} else getattr(split, "tp_size", None) or 1


def _divides(config: Any, split: Any) -> bool:
    """Return whether a model's plan divides the KV heads among the processes. If not, every process has all of them.

    A plan in the model's own split overrides that of its configuration.

    Args:
        config: the configuration of the model's text part.
        split: how the model was split: the ``distributed_config`` of its configuration.
    """
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    own = getattr(split, "tp_plan", None)
    plan |= own if isinstance(own, dict) else {}
    return any(name.rpartition(".")[2] in _KEYS and style == "colwise" for name, style in plan.items())


def number_of_heads(config: Any, ranks: int) -> int:
    """Return the number of KV heads of a layer, after checking that the ranks divide them and the query heads equally.

    Raises:
        UnsupportedModelError: they do not, or the model makes keys from latents or has no single number of heads.
    """
    queries = getattr(config, "num_attention_heads", None)
    keys = getattr(config, "num_key_value_heads", None) or queries
    # some configurations have a number for each layer
    if type(keys) is not int or type(queries) is not int or getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(
            f"{type(config).__name__} has no single number of KV heads, or makes them from latents, and kvkeep cannot "
            "follow how transformers splits it over processes. Run it in one process."
        )
    if keys % ranks or queries % ranks:
        kind, number = ("KV heads", keys) if keys % ranks else ("query heads", queries)
        fits = [n for n in range(1, ranks + 1) if not keys % n and not queries % n]
        raise UnsupportedModelError(
            f"{ranks} processes cannot divide the {number} {kind} of {type(config).__name__} equally. Start "
            f"{' or '.join(map(str, fits))} of them."
        )
    return keys
