"""Presses: classes with the names, options and defaults of kvpress, each of which becomes a policy and a budget."""

from __future__ import annotations

import abc
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, handed_over, taken_as
from kvkeep.errors import InputError, UnsupportedOperationError
from kvkeep.models.attention import attach
from kvkeep.models.support import unwrapped
from kvkeep.policies.registry import parse


@dataclass(frozen=True)
class CacheArguments:
    """What a press becomes for prompts of known lengths: arguments of `kvkeep.BoundedCache`.

    Attributes:
        policy: the policy's string.
        budgets: tokens kept of each row; layers may differ by `options`.
        options: other arguments, such as ``head_budget``.
    """

    policy: str
    budgets: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> CacheArguments:
        """Return these arguments with further options added.

        Raises:
            UnsupportedOperationError: one of them is there already, since two presses set it.
        """
        if twice := self.options.keys() & options.keys():
            raise UnsupportedOperationError(
                f"Two presses set {', '.join(sorted(twice))}, and a cache has one; drop one."
            )
        return replace(self, options={**self.options, **options})


def kept(tokens: int, compression_ratio: float) -> int:
    """Return how many of a prompt's tokens kvpress keeps: the whole part of ``tokens * (1 - ratio)``, at least 1."""
    # without the tolerance for rounding of `budget.from_ratio`, as kvpress computes it
    return max(1, int(tokens * (1 - compression_ratio)))


class BasePress(abc.ABC):
    """A press: within ``with press(model):`` prompts are read into a `kvkeep.BoundedCache`.

    The model is attached by `kvkeep.attach`, and stays so: the cache needs it afterwards.
    """

    compression_ratio: float

    @abc.abstractmethod
    def cache_options(self, lengths: Sequence[int], layers: int) -> CacheArguments | None:
        """Return the policy and the budget for prompts; ``None`` if all their tokens are kept.

        Args:
            lengths: number of tokens of each row's prompt, padding not counted.
            layers: number of the model's layers.

        Raises:
            InputError: an option is out of range.
        """

    @contextmanager
    def __call__(self, model: nn.Module) -> Iterator[None]:
        """Bound the cache of each prompt that the model reads within the context.

        An empty ``DynamicCache`` that is handed to the model becomes a `kvkeep.BoundedCache` in place, so that the
        caller's variable holds it. Without a cache the model's outputs hold a new one.

        Args:
            model: a model of transformers, also within PEFT's or ``torch.compile``'s wrapper.

        Raises:
            InputError: the model is none of transformers.
            UnsupportedModelError: kvkeep cannot attend for the model, see `kvkeep.attach`.
        """
        attach(model)
        inner = unwrapped(model)
        prompts = _Prompts(self, inner)
        # the decoder as well, which kvpress' users call without the head; a base model is its own
        parts = {id(part): part for part in (inner, inner.base_model)}.values()
        # first: the hook of `attach` tells a bounded cache the token ids, so the cache has to be bounded by then
        hooks = [part.register_forward_pre_hook(prompts.bound, with_kwargs=True, prepend=True) for part in parts]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _Prompts:
    """The prompts that a model reads within the context of a press.

    Args:
        press: says how a prompt's cache is bounded.
        model: the model whose configuration the caches are made from.
    """

    def __init__(self, press: BasePress, model: Any):
        self._press, self._config = press, model.config
        self._made: weakref.WeakSet[BoundedCache] = weakref.WeakSet()

    def bound(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Bound the cache of a forward call if it reads the beginning of a text; a forward pre-hook.

        Return the call's arguments with a new cache if it brings none; else ``None``: the arguments stay as they are.

        Raises:
            InputError: the cache is of a kind that cannot be bounded.
        """
        args, kwargs = _by_name(module, args, kwargs)
        cache = handed_over(kwargs)
        if kwargs.get("use_cache") is False or cache in self._made:
            return None  # nothing is stored, or the hook of the model around this one has seen to it
        if isinstance(cache, Cache) and cache.get_seq_length():
            return None  # a later piece of a text: kvpress cuts at the first one, and a bounded cache by itself
        options = self._press.cache_options(_lengths(args, kwargs), self._config.get_text_config().num_hidden_layers)
        if options is None:
            return None
        budgets = list(options.budgets)
        budget = budgets[0] if len(set(budgets)) == 1 else budgets
        made = BoundedCache(self._config, options.policy, budget, **options.options)
        if cache is not None:
            _become(cache, made)
            self._made.add(cache)
            return None
        self._made.add(made)
        # kvkeep's fused decoders pass everything on, and name no argument
        name = taken_as(type(module)) or CACHE_ARGUMENTS[-1]
        return args, {**kwargs, name: made}


def _by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward call, all by their names, since a cache may be given by its place as well.

    A call that does not fit the signature is returned as it is.
    """
    # kvkeep's fused decoders pass everything on to the class of transformers, which has the names
    several = (_places(vars(kind)["forward"]) for kind in type(module).__mro__ if "forward" in vars(kind))
    names = next(filter(None, several), ())
    given = dict(zip(names, args, strict=False))
    if len(args) > len(names) or given.keys() & kwargs.keys():
        return args, kwargs  # the call itself says what is wrong
    return (), {**given, **kwargs}


def _places(forward: Callable[..., Any]) -> Sequence[str]:
    """Return the names of a method's arguments that may be given by their places, in order, without ``self``."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, known in inspect.signature(forward).parameters.items() if known.kind in kinds][1:]


def _become(cache: object, made: BoundedCache) -> None:
    """Turn a caller's empty cache into a bounded one: callers go on with the object that they handed to the model.

    Raises:
        InputError: the cache is no plain ``DynamicCache``.
    """
    if isinstance(cache, BoundedCache):
        raise InputError(
            "A press bounds an empty DynamicCache, and was given a BoundedCache. Leave one of two presses that are "
            "active together (also in another thread), or pass the cache to the model without a press."
        )
    if type(cache) is not DynamicCache:  # a subclass stores in a way of its own
        raise InputError(
            f"A press bounds an empty DynamicCache, and was given a {type(cache).__name__}. Pass DynamicCache(), or no "
            "cache. For fewer bits per slot make a BoundedCache with `kv_bits`, without a press."
        )
    cache.__dict__ = made.__dict__
    cache.__class__ = BoundedCache  # type: ignore[assignment]  # both are caches without slots of their own


def _lengths(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens in each row of a forward call's input, padding not counted; at least 1.

    Raises:
        InputError: the call has neither token ids nor embeddings.
    """
    given = kwargs.get("input_ids", args[0] if args else None)  # by place only if `_by_name` found no names
    given = kwargs.get("inputs_embeds") if given is None else given
    if not isinstance(given, Tensor) or given.ndim < 2:
        raise InputError("A press needs the prompt's input_ids (or inputs_embeds) with an axis for rows.")
    rows, columns = given.shape[:2]
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == (rows, columns):
        return [max(1, number) for number in (mask != 0).sum(dim=1).tolist()]
    return [columns] * rows


# Presses that rate tokens.


@dataclass
class ScorerPress(BasePress):
    """A press that keeps the tokens with the highest scores.

    Args:
        compression_ratio: share of a prompt's tokens that are evicted, at least 0 and below 1.
    """

    compression_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check_ratio(self.compression_ratio)

    @property
    @abc.abstractmethod
    def policy(self) -> str:
        """Return the string of the policy that keeps the same tokens of a prompt."""

    @property
    def decoding_policy(self) -> str:
        """Return the policy's string for a cache in which generated tokens are rated, too."""
        return self.policy

    def cache_options(self, lengths: Sequence[int], layers: int) -> CacheArguments | None:
        """Return the policy, and the part of each prompt that stays; ``None`` under a ratio of 0."""
        _check_ratio(self.compression_ratio)  # which may have been set since
        if self.compression_ratio == 0:
            return None
        return self.under([kept(length, self.compression_ratio) for length in lengths], lengths, layers)

    def under(self, budgets: Sequence[int], lengths: Sequence[int], layers: int) -> CacheArguments:
        """Return the press' policy with these budgets, and with the other options that the press sets.

        Args:
            budgets: tokens kept of each row.
            lengths: number of tokens of each row's prompt.
            layers: number of the model's layers.
        """
        return CacheArguments(self.policy, budgets)


def _check_ratio(ratio: float) -> None:
    """Refuse a compression ratio out of range.

    Raises:
        InputError: the ratio is below 0, or 1 or more.
    """
    if not isinstance(ratio, (int, float)) or not 0 <= ratio < 1:
        raise InputError(
            f"compression_ratio={ratio!r:.60} is outside [0, 1): it is the share of tokens that are evicted."
        )


@dataclass
class KnormPress(ScorerPress):
    """Keeps the keys with the smallest norm: `knorm`."""

    @property
    def policy(self) -> str:
        """Return ``knorm``."""
        return "knorm"


@dataclass
class KeyDiffPress(ScorerPress):
    """Keeps the keys that differ most from the mean direction: `keydiff`."""

    @property
    def policy(self) -> str:
        """Return ``keydiff``."""
        return "keydiff"


@dataclass
class TOVAPress(ScorerPress):
    """Keeps the tokens that the newest query attends to, and the newest token: `tova`."""

    @property
    def policy(self) -> str:
        """Return ``tova`` with its newest token protected."""
        return "tova:protect_last=true"


@dataclass
class ObservedAttentionPress(ScorerPress):
    """Keeps the tokens with the largest mean attention: `h2o_avg` without recent tokens.

    The model's attention need not be eager.
    """

    @property
    def policy(self) -> str:
        """Return ``h2o_avg`` without protected tokens."""
        return "h2o_avg:recent=0"


@dataclass
class StreamingLLMPress(ScorerPress):
    """Keeps the first and the newest tokens at their own positions: `streaming_llm`.

    Args:
        n_sink: first tokens that stay.
    """

    n_sink: int = 4

    @property
    def policy(self) -> str:
        """Return ``streaming_llm`` with its sinks."""
        return f"streaming_llm:sinks={self.n_sink}"

    def under(self, budgets: Sequence[int], lengths: Sequence[int], layers: int) -> CacheArguments:
        """Return the policy with true positions, where kvkeep's own default are those in the cache."""
        return super().under(budgets, lengths, layers).with_options(positions="true")


@dataclass
class RandomPress(ScorerPress):
    """Keeps random tokens: `random`.

    Args:
        seed: seed of the random numbers; without one, it is drawn from torch's.
    """

    seed: int | None = None

    @property
    def policy(self) -> str:
        """Return ``random`` with a number for each token, drawn once."""
        # drawn anew for each prompt
        seed = int(torch.randint(2**31, ())) if self.seed is None else self.seed
        return f"random:mode=reservoir,seed={seed}"


@dataclass
class LeverageScorePress(ScorerPress):
    """Keeps the keys that stand out from all keys before rotation: `leverage`.

    Args:
        sketch_dimension: of no effect: leverages are computed without a sketch.
    """

    sketch_dimension: int = 48

    @property
    def policy(self) -> str:
        """Return ``leverage`` without protected tokens."""
        return "leverage:sinks=0,recent=0"


@dataclass
class ExpectedAttentionPress(ScorerPress):
    """Keeps the tokens that later queries are expected to attend to: `expected_attention`.

    Args:
        n_future_positions: positions after the prompt over which is averaged.
        n_sink: first tokens that stay.
        use_covariance: must be true; kvkeep always uses the spread of the queries.
        use_vnorm: must be true; kvkeep always weighs by the values' norms.
        epsilon: added to the probability before it is weighed.
    """

    n_future_positions: int = 512
    n_sink: int = 4
    use_covariance: bool = True
    use_vnorm: bool = True
    epsilon: float = 0.0

    @property
    def policy(self) -> str:
        """Return ``expected_attention`` with these options, without recent tokens.

        Raises:
            UnsupportedOperationError: the covariance or the norms are switched off.
        """
        if not (self.use_covariance and self.use_vnorm):
            raise UnsupportedOperationError(
                "ExpectedAttentionPress without use_covariance or use_vnorm has no equal in kvkeep; leave both true."
            )
        return (
            f"expected_attention:sinks={self.n_sink},recent=0,future={self.n_future_positions},epsilon={self.epsilon}"
        )


@dataclass
class SnapKVPress(ScorerPress):
    """Keeps the tokens that the end of a prompt attends to: `snapkv` with average pooling.

    Args:
        window_size: last tokens of a prompt, which stay and rate the others.
        kernel_size: width of the pooling along the prompt, an odd number.
    """

    window_size: int = 64
    kernel_size: int = 5

    name: ClassVar[str] = "snapkv"

    @property
    def policy(self) -> str:
        """Return the policy with this window and kernel."""
        return f"{self.name}:window={self.window_size},kernel={self.kernel_size},pool=avg"

    @property
    def decoding_policy(self) -> str:
        """Return the policy under which generated tokens compete by their mass."""
        return f"{self.policy},decode=score"


@dataclass
class PyramidKVPress(SnapKVPress):
    """Keeps SnapKV's tokens, more of them in lower layers: `pyramidkv`.

    Args:
        beta: steepness of the pyramid: the last layer has a share of 1 / beta.
    """

    beta: int = 20

    name: ClassVar[str] = "pyramidkv"

    def under(self, budgets: Sequence[int], lengths: Sequence[int], layers: int) -> CacheArguments:
        """Return the policy with the weights of layers under which they get kvpress' budgets, for the longest
        prompt.
        """
        return (
            super()
            .under(budgets, lengths, layers)
            .with_options(layer_budget=self._layers(max(budgets), max(lengths), layers) or "uniform")
        )

    def _layers(self, mean: int, tokens: int, layers: int) -> list[float]:
        """Return a weight for each layer, given the mean budget and the tokens before the cut; an empty list where they
        are too few for a pyramid, as in kvpress.

        Raises:
            InputError: `beta` is below 1.
        """
        if self.beta < 1:
            raise InputError(f"beta={self.beta} is below 1: the last layer would get more than the first.")
        last = mean / self.beta
        first = 2 * mean - last
        # as in kvpress: the first layer gets at most the prompt without its window, the last one what keeps the mean
        if first >= (most := tokens - self.window_size):
            first, last = most, 2 * mean - most
        if not tokens >= first >= last >= self.window_size or layers == 1:
            return []
        numbers = [first - layer * (first - last) / (layers - 1) for layer in range(layers)]
        return _weights(numbers, self.policy)


def _weights(numbers: Sequence[float | int], policy: str) -> list[float]:
    """Return the weights under which layers get these numbers of tokens: what `kvkeep.budget.per_layer` spreads by
    weight comes on top of the slots that the policy needs in every layer.
    """
    least = parse(policy).least
    return [max(float(number - least), 1e-6) for number in numbers]  # a weight has to be above 0


# Presses around another press.


@dataclass
class _Wrapper(BasePress):
    """A press that changes what another one becomes.

    Args:
        press: the other press.
    """

    press: ScorerPress

    def __post_init__(self) -> None:
        if not isinstance(self.press, ScorerPress):
            raise InputError(f"{type(self).__name__} takes a ScorerPress, not {self.press!r:.80}.")

    @property
    def compression_ratio(self) -> float:
        """Return the ratio of the other press."""
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        """Set the ratio of the other press."""
        self.press.compression_ratio = value

    @property
    @abc.abstractmethod
    def added(self) -> Mapping[str, Any]:
        """Return the options that this press adds to the cache of the other one."""

    def cache_options(self, lengths: Sequence[int], layers: int) -> CacheArguments | None:
        """Return what the other press becomes, with the options of this one added; ``None`` if it keeps everything."""
        inner = self.press.cache_options(lengths, layers)
        return inner and inner.with_options(**self.added)  # None stays


@dataclass
class AdaKVPress(_Wrapper):
    """Lets the KV heads of a layer share its budget by their scores: ``head_budget="ada"``.

    Args:
        alpha_safeguard: share of the budget that is divided equally.
    """

    alpha_safeguard: float = 0.20

    @property
    def added(self) -> Mapping[str, Any]:
        """Return Ada-KV's rule with this share."""
        return {"head_budget": f"ada:{self.alpha_safeguard}"}


@dataclass
class KeyRerotationPress(_Wrapper):
    """Attends tokens at their rank in the cache: ``positions="slot"``."""

    @property
    def added(self) -> Mapping[str, Any]:
        """Return positions by rank."""
        return {"positions": "slot"}

    def cache_options(self, lengths: Sequence[int], layers: int) -> CacheArguments | None:
        """Return what the other press becomes, with positions by rank in place of its own; ``None`` if it keeps
        everything.
        """
        inner = self.press.cache_options(lengths, layers)
        # replaced and not added: StreamingLLMPress sets positions, too
        return inner and replace(inner, options={**inner.options, **self.added})


@dataclass
class BlockPress(_Wrapper):
    """Reads a prompt in blocks and evicts after each: ``prefill_chunk``.

    Args:
        block_size: tokens of a block.
    """

    block_size: int = 128

    @property
    def added(self) -> Mapping[str, Any]:
        """Return the size of a chunk."""
        return {"prefill_chunk": self.block_size}


@dataclass
class PerLayerCompressionPress(BasePress):
    """Gives each layer a ratio of its own: ``layer_budget``.

    Args:
        press: the press whose policy is used.
        compression_ratios: share of a prompt's tokens that each layer evicts.
    """

    press: ScorerPress
    compression_ratios: Sequence[float]

    def cache_options(self, lengths: Sequence[int], layers: int) -> CacheArguments | None:
        """Return the press' policy with a weight for each layer, by its ratio, for the longest prompt. It is never
        ``None``.

        Raises:
            InputError: there is not one ratio for each layer, or one is out of range.
        """
        if len(self.compression_ratios) != layers:
            raise InputError(
                f"PerLayerCompressionPress has {len(self.compression_ratios)} compression_ratios for {layers} layers; "
                "give one for each."
            )
        for ratio in self.compression_ratios:
            _check_ratio(ratio)
        numbers = {length: [kept(length, ratio) for ratio in self.compression_ratios] for length in lengths}
        # the budget is the mean of all layers, to the next whole number, and their weights spread it
        options = self.press.under([round(sum(numbers[length]) / layers) for length in lengths], lengths, layers)
        return options.with_options(layer_budget=_weights(numbers[max(lengths)], options.policy))


@dataclass
class ComposedPress(BasePress):
    """One press. Several, one after the other, have no equal.

    Args:
        presses: the press, in a list.

    Raises:
        UnsupportedOperationError: there is not just one.
    """

    presses: Sequence[BasePress]

    def __post_init__(self) -> None:
        """Refuse any number of presses but one; an empty list, too."""
        if len(self.presses) != 1:
            raise UnsupportedOperationError(
                f"ComposedPress of {len(self.presses)} presses has no equal in kvkeep: a cache has one policy. Compose "
                "one press, or choose the policy that rates as you want."
            )

    @property
    def compression_ratio(self) -> float:  # type: ignore[override]  # the press has it
        """Return the ratio of the press."""
        return self.presses[0].compression_ratio

    def cache_options(self, lengths: Sequence[int], layers: int) -> CacheArguments | None:
        """Return what the only press becomes; ``None`` if it keeps everything."""
        return self.presses[0].cache_options(lengths, layers)


@dataclass
class DecodingPress(BasePress):
    """Keeps a fixed number of tokens while an answer is generated, whatever the prompt's length.

    Args:
        base_press: rates the tokens; its own ratio does not count.
        compression_interval: of no effect: each step evicts, so the cache never holds more than `target_size`.
        target_size: tokens kept. A longer prompt is cut, too.
        hidden_states_buffer_size: of no effect: nothing is buffered.

    Raises:
        InputError: the press rates no tokens, or a number is below 1.
    """

    base_press: ScorerPress | AdaKVPress
    compression_interval: int = 512
    target_size: int = 2048
    hidden_states_buffer_size: int = 256

    def __post_init__(self) -> None:
        """Check the press and the numbers."""
        if not isinstance(self.base_press, (ScorerPress, AdaKVPress)):
            raise InputError(f"DecodingPress takes a ScorerPress or an AdaKVPress, not {self.base_press!r:.80}.")
        if self.target_size < 1 or self.compression_interval < 1:
            raise InputError("DecodingPress needs a target_size and a compression_interval of 1 or more.")

    def cache_options(self, lengths: Sequence[int], layers: int) -> CacheArguments:
        """Return the policy under which generated tokens are rated, with `target_size` as the budget."""
        base = self.base_press.press if isinstance(self.base_press, AdaKVPress) else self.base_press
        before = self.target_size + self.compression_interval  # tokens that kvpress' cache has when it is cut
        options = base.under([self.target_size] * len(lengths), [before] * len(lengths), layers)
        options = replace(options, policy=base.decoding_policy)
        return options.with_options(**self.base_press.added) if isinstance(self.base_press, AdaKVPress) else options
