"""Random orders of steps and changes: a layer whose steps repeat holds and answers what one holds that is told all."""

import copy
import random

import pytest
import torch
from test_decode_replay import tokens

import kvkeep
from kvkeep.backends.native import native
from kvkeep.cache.layer import Layer
from kvkeep.types import AttentionOptions, Phase

pytestmark = pytest.mark.skipif(native().library is None, reason="no native kernel")

POLICIES = (
    "h2o",
    "local",
    "streaming_llm",
    "full",
    "h2o:graduate=compete",
    "h2o:decay=0.9",
    "snapkv:decode=score,window=2",
    "snapkv:window=3",
    "reread:recent=4,sinks=2",
)
CHANGES = ("padded", "prompt", "probe", "rows", "other rows", "soft cap", "wrong rows", "wrong dtype", "clear")
OTHERS = ("move", "widen", "budget", "reset", "hold", "inference", "grad")
MODES = {"inference": torch.inference_mode, "grad": torch.enable_grad}


class Twins:
    """Two layers that get the same steps, one of which never repeats."""

    def __init__(self, seed):
        draw = self.draw = random.Random(seed)
        policy, bits = draw.choice(POLICIES), draw.choice([None, None, "8", "k8v4"])
        self.window = draw.choice([None, None, 8]) if policy != "full" else None
        budget = 400 if policy == "full" else draw.choice([12, 20, [10, 12, 14], [(12, 9), (15, 11), (10, 20)]])
        self.layers = [Layer(kvkeep.parse(policy), budget, window=self.window, kv_bits=bits) for _ in range(2)]
        self.layers[1].paths.may_record = lambda *_, **__: False
        self.seed, self.rows, self.dtype = 1000 * seed, 3, draw.choice([torch.float32, torch.bfloat16])

    def both(self, change):
        """Change both layers, and compare them."""
        found = []
        for layer in self.layers:
            try:
                found.append((None, change(layer)))
            except kvkeep.KVKeepError as error:
                found.append((f"{type(error)} {error}", None))
        (error, out), (expected_error, expected) = found
        assert error == expected_error
        assert not isinstance(out, torch.Tensor) or torch.equal(out.nan_to_num(), expected.nan_to_num())
        one, other = self.layers
        assert (one.columns, one.moves, one.broken) == (other.columns, other.moves, other.broken)
        for name, tensor in one.block.per_row().items() if one.allocated else ():
            assert torch.equal(tensor.nan_to_num(), other.block.per_row()[name].nan_to_num()), name

    def step(self, T=1, *, rows=None, dtype=None, phase=None, softcap=None, mode=torch.no_grad, real=None):
        self.seed += 1
        given = tokens(T, self.seed, rows=rows or self.rows, dtype=dtype or self.dtype)
        phase = phase or (Phase.DECODE if T == 1 else Phase.PREFILL)

        def run(layer):
            with mode():
                return layer.step(*given, options=AttentionOptions(0.25, self.window, softcap), phase=phase, real=real)

        self.both(run)

    def change(self, name):  # noqa: C901  one line for each change
        draw, rows, block = self.draw, self.rows, self.layers[0].block
        index = torch.tensor([draw.randrange(rows) for _ in range(rows)])
        if name == "padded":
            self.step(real=torch.tensor([[draw.random() < 0.6] for _ in range(rows)]))
        elif name == "prompt":
            self.step(draw.randint(2, 5))
        elif name == "probe":
            self.step(2, phase=Phase.PROBE)
        elif name == "rows":
            self.both(lambda layer: layer.select_rows(index))
        elif name == "other rows":
            self.both(lambda layer: layer.select_rows(torch.cat([index, index])))
            self.both(lambda layer: layer.select_rows(torch.arange(rows)))
        elif name == "soft cap":
            self.step(softcap=2.0)
        elif name == "wrong rows":
            self.step(rows=rows + 1)
        elif name == "wrong dtype":
            self.step(dtype=torch.float16)
        elif name == "clear":
            self.both(lambda layer: layer.block.clear_row(1))
        elif name == "move":
            self.both(lambda layer: layer.block.move_row(0, 1))
        elif name == "widen" and not block.store.tables():  # a pool is divided anew, and not widened
            capacity = block.store.capacity + 3
            self.both(lambda layer: layer.block.widen(capacity))
        elif name == "budget" and isinstance(block.budget, int) and block.budget < 100:
            budget = draw.randint(6, block.store.capacity - 1)
            self.both(lambda layer: setattr(layer.block, "budget", budget))
        elif name == "reset":
            self.both(Layer.reset)
        elif name == "hold":
            self.both(lambda layer: layer.hold(copy.deepcopy(layer.block), columns=layer.columns))
        elif name in MODES:
            self.step(mode=MODES[name])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16))
def test_random_orders(seed):
    for part in range(25):
        twins = Twins(25 * seed + part)
        twins.step(9)
        for _ in range(20):
            if twins.draw.random() < 0.5:
                twins.step()
            else:
                twins.change(twins.draw.choice(CHANGES + OTHERS))
