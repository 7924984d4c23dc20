"""What backends are asked: slots with holes, chunks behind them, options of models and statistics of policies."""

import dataclasses
import itertools

import pytest
import torch

from kvkeep import backends
from kvkeep.attention_stats import LastHit, Low, LowRows, Mass, MassAndLast, Nothing, Peak
from kvkeep.backends.native import native
from kvkeep.backends.triton import launch
from kvkeep.noise import Gumbel
from kvkeep.types import AttentionOptions, Slots, Top

from .dummy_backend import DummyBackend

BACKENDS = {kind.name: kind for kind in (*backends.KINDS.values(), DummyBackend)}
SLOW = {"triton", "dummy", "reference"}
"""Interpreted, loops, the judge itself: each is asked a part of the questions, with every option and statistic."""

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 6
NOW = 5000
WINDOW = 3000


def device_of(name):
    """Native code runs on CPUs; the others where there is most to find."""
    return torch.device("cuda" if torch.cuda.is_available() and name != "native" else "cpu")


def there(thing, device):
    """Tensors, and what is made of them, on a device."""
    if isinstance(thing, torch.Tensor):
        return thing.to(device)
    if isinstance(thing, tuple):
        found = [there(one, device) for one in thing]
        return type(thing)(*found) if hasattr(thing, "_fields") else tuple(found)
    if dataclasses.is_dataclass(thing):
        fields = {field.name: there(getattr(thing, field.name), device) for field in dataclasses.fields(thing)}
        return dataclasses.replace(thing, **fields)
    return thing


def on(name, *things):
    """Things where a backend works."""
    return there(things, device_of(name))


def backend_of(name):
    """The backend of a name, or a reason to skip."""
    if name == "native" and native().library is None:
        pytest.skip(native().detail)
    if name == "triton" and device_of(name).type not in launch.kernels().devices:
        pytest.skip(launch.kernels().detail)
    return BACKENDS[name]()


def token(S, D, G, dtype=torch.float32, *, E=None, Hk=2, seed=0):
    """One token; slots full, a few empty, most empty, all empty, with a key that takes all. Two queries are padding."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(ROWS, Hk * G, 1, D, generator=g)
    k = torch.randn(ROWS, Hk, S, D, generator=g)
    v = torch.randn(ROWS, Hk, S, E or D, generator=g)
    positions = torch.stack([torch.randperm(NOW, generator=g)[:S] for _ in range(ROWS * Hk)]).view(ROWS, Hk, S).int()
    positions[1][torch.rand(Hk, S, generator=g) < 0.2] = -1
    positions[2][torch.rand(Hk, S, generator=g) < 0.9] = -1
    positions[:, :, S // 3] = NOW  # the query's own token
    if S > 3:
        positions[:, :, :2] = torch.tensor([NOW - WINDOW, NOW - WINDOW + 1])  # just beyond a window, and just within
    positions[3] = -1
    k[4, :, S // 3] = 20 * q[4, ::G, 0]
    for tensor in (k, v):
        tensor[positions < 0] = torch.nan  # what is left in an empty slot must not matter
    now = torch.full((ROWS, 1), NOW)
    now[3] = now[5] = -1
    return q.to(dtype), Slots(k.to(dtype), v.to(dtype), positions), now


def chunk(T=33, S=17, D=32, G=2, *, Hk=2, E=None, dtype=torch.float32, seed=0, pads=0, shared=False, B=2):
    """``S`` unordered slots with holes, ragged, and behind them the keys of a chunk, padded in its last row."""
    g = torch.Generator().manual_seed(seed)
    past = 2 * S + 10
    q = torch.randn(B, T, Hk * G, D, generator=g).transpose(1, 2)  # strided as a model's are
    k = torch.randn(B, Hk, S + T, D, generator=g)
    v = torch.randn(B, Hk, S + T, E or D, generator=g)
    heads = 1 if shared else Hk
    slots = torch.stack([torch.randperm(past, generator=g)[:S] for _ in range(B * heads)]).view(B, heads, S)
    slots = slots.masked_fill(torch.rand(slots.shape, generator=g) < torch.tensor([0.2, 0.8])[-B:].view(B, 1, 1), -1)
    now = (past + torch.arange(T)).repeat(B, 1)
    now[-1] = torch.where(torch.arange(T) < pads, -1, now[-1] - pads)
    slots = torch.cat([slots, now[:, None].expand(B, heads, T)], dim=-1)
    return q.to(dtype), Slots(k.to(dtype), v.to(dtype), slots.to(torch.int32)), now


def options(window, sinks):
    """What models ask for."""
    plain = AttentionOptions(scaling=0.2)
    return {
        "plain": plain,
        "window": dataclasses.replace(plain, window=window),
        "softcap": AttentionOptions(scaling=1.0, softcap=3.0),
        "sinks": dataclasses.replace(plain, sinks=sinks),
        "all": AttentionOptions(scaling=0.5, window=window, softcap=2.0, sinks=sinks),
    }


OF_TOKEN = {
    **options(WINDOW, torch.tensor([0.3, -1.0, 2.0, 5.0, -torch.inf, 0.0])),
    "a window that hides all but one": AttentionOptions(scaling=0.2, window=1),
    "largest": AttentionOptions(scaling=0.2, top=Top(torch.tensor([3, 40, 2, 5, 0, 7]), renormalise=True)),
    "largest, as they are": AttentionOptions(scaling=0.2, top=Top(torch.tensor([4, 4, 4, 4, 0, 4]), renormalise=False)),
}
SINKS = torch.tensor([0.3, -1.0, 2.0, 60.0, -torch.inf, 0.0])
GREAT_SINK = AttentionOptions(scaling=0.2, sinks=SINKS)
GREAT_SINK_AND_ALL = AttentionOptions(scaling=0.5, window=WINDOW, softcap=2.0, sinks=SINKS)
"""One head's sink takes nearly all: its keys are left with e^-60."""

OF_CHUNK = options(19, torch.tensor([0.3, -1.0, 2.0, 5.0]))

ON_TOKEN = {
    "nothing": Nothing(),
    "mass": Mass(),
    "no row": Mass(rows=0),
    "some rows": Mass(rows=torch.tensor([0, 1, 5, 1, 0, 2])),
    "gain": Mass(gain=2.5),
    "gains": Mass(rows=1, gain=torch.tensor([1.0, 1.5, 0.0, 2.0, 0.7, 1.0])),
    "noise": Mass(gain=0.7, noise=Gumbel(5, 1, torch.arange(ROWS))),
    "decay": Mass(decay=0.9, last=torch.full((ROWS,), NOW + 3)),
    "decay to nothing": Mass(decay=0.0, last=torch.tensor([NOW, NOW + 1, NOW, NOW, NOW, NOW])),
    "last": MassAndLast(last=NOW),
    "not last": MassAndLast(last=torch.tensor([NOW, NOW + 1, NOW, 7, NOW, NOW]), decay=0.5),
    "low": Low(theta=1.3),
    "live": Low(rows=torch.tensor([1, 1, 0, 1, 1, 1]), theta=0.7, live=True),
    "hit": LastHit(quantile=0.6),
    "peak": Peak(),
}
ON_CHUNK = {
    "nothing": Nothing(),
    "mass": Mass(),
    "last": Mass(rows=1),
    "window": Mass(rows=18),
    "no row": Mass(rows=0),
    "ragged": Mass(rows=torch.tensor([20, 4])),
    "gain": Mass(gain=torch.tensor([1.5, 0.5])),
    "gain of a window": Mass(rows=7, gain=1.7),
    "noise": Mass(gain=0.7, noise=Gumbel(5, 1, torch.tensor([3, 4]))),
    "decay": Mass(decay=0.9, last=torch.tensor([40, 39])),
    "mass and last": MassAndLast(rows=9, last=torch.tensor([76, 71])),
    "low": Low(),
    "low of a window": Low(rows=11, theta=2.0),
    "live": Low(live=True, theta=0.7),
    "bit of each row": LowRows(rows=33, words=2, last=torch.tensor([76, 71]), due=torch.tensor([4, 0])),
    "hit": LastHit(rows=14, quantile=0.6),
    "peak": Peak(rows=20),
}


def check_alike(found, want, now, *, rtol, atol):
    """Compare outputs and masses of two backends. The outputs of padded queries are undefined."""
    (out, report), (wanted, want_report) = found, want
    real = (now >= 0)[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[real], wanted[real], rtol=rtol, atol=atol)
    torch.testing.assert_close(report.mass, want_report.mass, rtol=rtol, atol=atol)


def asked(statistics, options):
    """Backend, statistic and option, by name: every pair; for slow ones all options with a gain, the others once."""
    for name in BACKENDS:
        turn = itertools.cycle(options)
        for statistic in statistics:
            for option in options if name not in SLOW or statistic == "gain" else [next(turn)]:
                yield name, statistic, option
