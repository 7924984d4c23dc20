import torch

from kvkeep.noise import uniform

MASK = 2**64 - 1


def by_hand(seed, *keys):
    """The same hash in Python's unbounded integers."""
    state = seed
    for key in keys:
        state = ((state ^ (key & MASK)) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return (state >> 40) / 2**24


def test_equals_splitmix_in_plain_integers():
    positions = torch.tensor([0, 1, 2, 1000, 2**31 - 1, -1])
    for seed in (7, 2**63, 2**64 - 1):
        got = uniform(seed, torch.tensor(3), positions)
        assert got.tolist() == [by_hand(seed, 3, p) for p in positions.tolist()]


def test_looks_uniform_and_depends_on_every_key():
    x = uniform(0, torch.arange(50)[:, None], torch.arange(400)).double()
    assert abs(x.mean().item() - 0.5) < 0.005
    assert abs(x.var().item() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(x[:2])[0, 1].item()) < 0.15
    assert x.unique().numel() > 0.99 * x.numel()
    assert not torch.equal(uniform(0, torch.arange(9)), uniform(1, torch.arange(9)))


def test_does_not_depend_on_shape_or_neighbours():
    assert uniform(5, torch.arange(9))[4] == uniform(5, torch.tensor([4]))[0]
