"""The model and the settings that a sequence's memory belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.errors import PolicyError, SnapshotError

if TYPE_CHECKING:
    from kvkeep.policies.base import Policy

FORMAT = 2
"""Version of the contents and of the file. Higher ones are refused. In version 1 layers with sliding windows had other
shares of a budget."""

_PASSING = {
    *("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"),
    *("return_dict", "output_attentions", "output_hidden_states", "attn_implementation", "_attn_implementation"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"),
    *("id2label", "label2id", "problem_type", "torchscript", "is_encoder_decoder", "chunk_size_feed_forward"),
}
"""Entries of a configuration that do not change what a model computes."""

_NAMES = {
    "version": "format version",
    "config": "model configuration",
    "dtype": "dtype",
    "weights": "weights or adapters",
    "tokenizer": "tokenizer",
    "policy": "policy",
    "budget": "budget",
    "layer_budget": "layer_budget",
    "head_budget": "head_budget",
    "positions": "positions mode",
    "chunk": "prefill_chunk",
    "kv_bits": "kv_bits",
}
"""Part → its name in messages, in the order in which parts are compared."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The model and the settings that a sequence's memory belongs to. Under others it would mean nothing.

    Attributes:
        model: name of the model, for people; it is not compared.
        config: hash of the model's configuration.
        policy: the policy's string.
        budget: the row's budget.
        layer_budget: rule by which the budget is spread over the layers, or one weight per layer.
        head_budget: rule by which heads share a layer's budget; ``None``: the policy's own.
        dtype: dtype of the keys; ``None`` if nothing is cached yet.
        positions: ``true`` or ``slot``.
        chunk: tokens of the prompt that are taken at once.
        kv_bits: bits of keys and values in the slots; ``None``: the dtype of the keys.
        weights: hash of the model's weights, with those of an adapter; ``None`` if the model is not known.
        tokenizer: hash of the tokenizer; ``None`` if it is not known.
        adapter: the name that the adapter had, for people; it is not compared.
        version: version of kvkeep's format.
    """

    model: str
    config: str
    policy: str
    budget: int
    layer_budget: str | tuple[float, ...] = "uniform"
    head_budget: str | None = None
    dtype: str | None = None
    positions: str = "true"
    chunk: int | None = None
    kv_bits: str | None = None
    weights: str | None = None
    tokenizer: str | None = None
    adapter: str | None = None
    version: int = FORMAT

    def differences(self, other: Fingerprint) -> dict[str, tuple[object, object]]:
        """Return the parts in which two fingerprints differ, by name, with both values.

        A part that is ``None`` on one side counts as unknown and is not compared, apart from ``chunk``, ``head_budget``
        and ``kv_bits``.
        """
        pairs = {name: (getattr(self, key), getattr(other, key)) for key, name in _NAMES.items()}
        strict = {_NAMES["chunk"], _NAMES["head_budget"], _NAMES["kv_bits"]}  # None is a choice, too
        return {
            name: (mine, theirs)
            for name, (mine, theirs) in pairs.items()
            if mine != theirs and (name in strict or None not in (mine, theirs))
        }

    def check(self, here: Fingerprint) -> None:
        """Refuse to use a memory, whose fingerprint this is, under another model or other settings.

        Args:
            here: the fingerprint of the place where the memory would be used.

        Raises:
            SnapshotError: a part differs. The message names the part and both values.
        """
        found = self.differences(here)
        if not found:
            return
        shown = [
            f"{name} ({_short(mine)} in the snapshot, {_short(theirs)} here)" for name, (mine, theirs) in found.items()
        ]
        if _NAMES["config"] in found and self.model != here.model:
            shown[0] += f", as {self.model} is not {here.model}"
        if _NAMES["weights"] in found:
            shown[list(found).index(_NAMES["weights"])] += (
                f", as it was made with {_with(self.adapter)} and not with {_with(here.adapter)}"
                if self.adapter or here.adapter
                else ", which `load_in` changes as well"
            )
        raise SnapshotError(
            f"The snapshot cannot be used here. Different: {'; '.join(shown)}. Its memory means nothing under other "
            "settings: use the same ones, or read the text again."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all parts as plain data, for a file; without ``adapter`` if there is none."""
        found = asdict(self)
        return found if self.adapter is not None else {name: part for name, part in found.items() if name != "adapter"}


def _with(adapter: str | None) -> str:
    """Return a phrase for the adapter that a memory was made with."""
    return "the base model" if adapter is None else f"the adapter {adapter}"


def _short(value: object) -> str:
    """Return a value as a message shows it, cut to 80 characters."""
    return f"{value!s:.80}"


def hash_of_config(config: Any) -> str:
    """Return a hash, 16 hexadecimal digits, of the entries of a configuration on which the model's results depend,
    those of its text model.
    """
    text = config.get_text_config(decoder=True)
    fields = {name: value for name, value in text.to_dict().items() if name not in _PASSING}
    # default: some values are no JSON, such as dtypes
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def name_of_config(config: Any) -> str:
    """Return a readable name for a model: its name on the hub, the name of its folder, or else its model type."""
    name = str(getattr(config, "name_or_path", "") or "").replace("\\", "/").rstrip("/")
    # a folder: names on the hub have one slash
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        name = name.rpartition("/")[2]
    return name or str(config.model_type)


def rule(layer_budget: str | Sequence[float]) -> str | tuple[float, ...]:
    """Return a layer budget rule in the form in which `Fingerprint` compares it: its name, or its weights as a tuple of
    floats.
    """
    return layer_budget if isinstance(layer_budget, str) else tuple(map(float, layer_budget))


def policy_named(policy: str) -> Policy:
    """Return the policy that a snapshot names. Only registered names are accepted, since a file could name any
    module.

    Raises:
        SnapshotError: no policy of that name is registered, or its options are wrong.
    """
    from kvkeep.policies.registry import available, parse, split  # imports torch

    name, _ = split(policy)
    try:
        if name in available():
            return parse(policy)
        why = f"No policy of the name {name!r:.80} is registered"
    except PolicyError as error:
        why = str(error).rstrip(".")
    raise SnapshotError(f"The snapshot's policy cannot be made: {why}. If it is your own, pass it as `policy`.")


def name_of_policy(policy: Policy) -> str:
    """Return a policy's string. For a registered policy, `kvkeep.policies.registry.parse` makes an equal one of it; the
    string of any other is for people.
    """
    from kvkeep.policies.registry import spec  # imports torch

    try:
        return spec(policy)
    except PolicyError:
        return str(policy)
