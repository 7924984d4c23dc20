"""By how much a backend may differ from float64: what float32's rounding allows, and not more."""

import torch

from kvkeep.attention_stats import Mass, ones
from kvkeep.backends import AttentionInputs, reference

UNIT = 2.0**-24  # a float32 operation errs by at most this, relative to its result
TINY = torch.finfo(torch.float32).tiny

HALVES = {torch.float32: 0.0, torch.float64: 0.0, torch.bfloat16: 2.0**-16, torch.float16: 2.0**-22}
"""What two halves leave of a float32 weight, relative to it. Each leaves at most 2^-9 of what it is given in bfloat16,
2^-11 in float16; where Triton interprets, 2^-8 in bfloat16, for there it cuts instead of rounding."""

CUT = {torch.float32: UNIT, torch.float64: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""What is lost by writing a number down; the interpreter cuts bfloat16 where a GPU rounds, to 2^-8."""


def check(backend, given, statistic, options, *, slack=0.0):
    """Output, with `slack` beyond its bound, and report against the definition; what was found, for more questions."""
    query, slots, now = given
    out, report = backend.attend(AttentionInputs(query, slots, now, statistic=statistic, options=options))
    clean = slots._replace(keys=slots.keys.nan_to_num(0.0), values=slots.values.nan_to_num(0.0))
    want, want_report = reference.attend(AttentionInputs(query, clean, now, statistic=statistic, options=options))
    positions = slots.positions.expand(clean.keys.shape[:3])
    p = reference.probabilities(query, clean.keys, now, positions, options)
    size = torch.einsum("bhgts,bhse->bhgte", p, clean.values.double().abs()).flatten(1, 2)
    allowed = _of_token if query.shape[2] == 1 else _of_chunk
    bound, relative = allowed(backend.name, query, clean, want, size, statistic, options)
    assert (out.dtype, out.shape) == (query.dtype, want.shape)
    assert out.isfinite().all()
    settled = (now >= 0)[:, None, :, None].expand_as(want)
    assert ((out.double() - want).abs() <= bound + slack)[settled].all()
    assert report.sums.keys() == want_report.sums.keys() == set(statistic.fields)
    if query.dtype == torch.float32:
        torch.testing.assert_close(out[settled].double(), want[settled], rtol=1e-5, atol=1e-6 + slack)
    for name, found in report.sums.items():
        assert (found.dtype, found.shape) == (torch.float32, clean.keys.shape[:3])
        wanted = want_report.sums[name]
        wrong, within = (found.double() - wanted).abs(), relative * wanted.abs() + TINY
        if name.startswith("low"):  # a count, or bits: only next to the threshold may they differ
            wrong = wrong if name == "low" else ones(found.int() ^ wanted.int())
            within = _near_threshold(p, now, positions, statistic, relative)
        assert (wrong <= within).all(), name
    return out, report


def _sizes(query, keys, options):
    """Sizes of the products that make a logit, (B, Hk, G, T, S)."""
    grouped = query.double().abs().unflatten(1, (keys.shape[1], -1))
    return torch.einsum("bhgtd,bhsd->bhgts", grouped, keys.double().abs()) * options.scaling


def _of_token(name, query, slots, want, size, statistic, options):
    """Bounds of the output of one token, absolute, and of its report, relative, per head.

    A logit errs by D + 2 roundings of the sum of its products' sizes (in Triton D + 3: D of the sum, the scaling, the
    base of logarithms and its own), a capped one by 8 roundings of the cap more; e to the x turns that into a relative
    error, once for the numerator and once for the sum, which has S terms more. A gain multiplies both. 16 roundings are
    for the rest: powers, their products, the mean over the group, the decay.

    An output errs by what its weights err and, in Triton, by what two halves leave of them, both relative to Σ p·|v|
    (`size`); in float16 a weight below 2^-14 of the largest loses up to 2^-25 of that, in each of S slots; then the
    output is rounded to its dtype. The smallest normal number is for results that underflow.
    """
    (B, Hk, S, D), is_triton = slots.keys.shape, name == "triton"
    hidden = (slots.positions < 0)[:, :, None, None]
    largest = _sizes(query, slots.keys, options).masked_fill(hidden, 0.0).amax(dim=-1).flatten(1)
    logit = (D + 2 + is_triton) * UNIT * largest + 8 * UNIT * (options.softcap or 0.0)
    gain = torch.as_tensor(getattr(statistic, "gain", 1.0)).double().view(-1, 1).to(query.device)
    relative = (2 * gain.clamp(min=1.0) * logit + (S + 16) * UNIT)[..., None]
    rounding = torch.finfo(query.dtype).eps / 2 * want.abs() + torch.finfo(query.dtype).tiny
    halves = HALVES[query.dtype] * is_triton
    lost = S * 2.0**-25 * slots.values.double().abs().amax() * (is_triton and query.dtype == torch.float16)
    bound = (relative[..., None] + halves) * size + lost + rounding
    return bound, relative.view(B, Hk, -1).amax(dim=-1, keepdim=True)


def _of_chunk(name, query, slots, want, size, statistic, options):
    """The same of a chunk; one bound for all logits. See the docstring of `kvkeep.backends.triton.prefill`."""
    S, rows = slots.keys.shape[2], query.shape[1] // slots.keys.shape[1] * query.shape[2]
    gain = torch.as_tensor(statistic.gain).max().item() if isinstance(statistic, Mass) else 1.0
    wide, rounding = _slack(query, slots.keys, options), torch.finfo(query.dtype).eps / 2
    step = CUT[query.dtype] if name == "triton" else 0.0  # the others weigh in float32
    bound = (2 * wide + (S + 4) * UNIT + (step if step > UNIT else 0.0)) * size
    bound = bound + max(step, rounding) * want.abs() + torch.finfo(query.dtype).tiny
    if step and query.dtype == torch.float16:  # numbers below 2^-14 have no more than 2^-25 of precision
        bound = bound + 2.0**-25 * (1 + slots.values.double().abs().sum(dim=2).amax())
    return bound, 2 * _slack(query, slots.keys, options, max(gain, 1.0)) + (rows + 8) * UNIT


def _slack(query, keys, options, gain=1.0):
    """By what factor a probability may be off."""
    most = _sizes(query, keys, options).max().item()
    S, D = keys.shape[2:]
    logit = (D + 4) * UNIT * most + (8 * UNIT * options.softcap if options.softcap else 0.0)
    size = most if options.softcap is None else options.softcap
    size = max(size, 0.0 if options.sinks is None else options.sinks.abs().max().item())
    return 2 * gain * logit + UNIT * (8 * gain * size + 4 * torch.tensor(float(S)).log().item() + S + 20)


def _near_threshold(p, now, positions, statistic, relative):
    """How many rows there are in which rounding may decide whether a key has less than its share."""
    visible = (positions[:, :, None] >= 0) & (positions[:, :, None] <= now[:, None, :, None])
    n = visible.sum(-1, keepdim=True) if statistic.live else (now + 1)[:, None, :, None]
    relative = relative[:, :, None] if isinstance(relative, torch.Tensor) else relative
    near = ((p.mean(dim=2) * n * statistic.theta - 1).abs() <= 2 * relative).sum(dim=2)
    assert near.sum() <= 0.05 * near.numel()
    return near
