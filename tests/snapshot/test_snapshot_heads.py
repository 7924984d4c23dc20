"""State that each head has once, in files: it goes on bit for bit, and what does not fit is refused."""

from dataclasses import replace

import pytest
import torch
from snapshot_models import bounded, feed, ids, model

from kvkeep import Snapshot, SnapshotError

POLICY = "leverage:sinks=1,recent=2"
DAMAGES = {
    "a column less": ("state.scatter", lambda tensor: tensor[..., :-1]),
    "an axis more": ("state.count", lambda tensor: tensor[..., None]),
    "another dtype": ("state.mean", lambda tensor: tensor.double()),
    "missing": ("state.mean", lambda tensor: None),
}


def taken():
    cache = bounded(model(), POLICY)
    feed(model(), cache, ids(1), 0, 27)
    return cache, cache.snapshot()


def test_a_prompt_in_two_parts_goes_on_from_a_file(tmp_path):
    cache, snapshot = taken()
    snapshot.save(tmp_path / "file")
    again = bounded(model(), POLICY)
    again.restore(0, Snapshot.load(tmp_path / "file"))
    one, other = (feed(model(), each, ids(1), 27, 40, prompt=40) for each in (cache, again))
    assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    for layer, held in zip(cache.bounded_layers().values(), again.bounded_layers().values(), strict=True):
        assert all(torch.equal(layer.state[name], held.state[name]) for name in layer.policy.summaries)


@pytest.mark.parametrize("damage", DAMAGES)
def test_state_that_does_not_fit_is_refused(damage, tmp_path):
    (cache, snapshot), (name, change) = taken(), DAMAGES[damage]
    first, *rest = snapshot.contents.layers
    tensors = {**first.tensors, name: change(first.tensors[name])}
    first = replace(first, tensors={key: tensor for key, tensor in tensors.items() if tensor is not None})
    replace(snapshot, contents=replace(snapshot.contents, layers=(first, *rest))).save(tmp_path / "file")
    before = {key: tensor.clone() for key, tensor in cache.bounded_layers()[0].block.per_row().items()}
    with pytest.raises(SnapshotError, match=name):
        cache.restore(0, Snapshot.load(tmp_path / "file"))
    after = cache.bounded_layers()[0].block.per_row()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
