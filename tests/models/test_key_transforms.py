"""What is done to keys of 4 bits before they are coded: how it is found, and that it stays with the tokens."""

import functools
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

import kvkeep
from kvkeep import BoundedCache, Snapshot
from kvkeep.attention_probe import tapes
from kvkeep.cache.rotary_probe import rotations_for
from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.kv.slot_codec import KeyTransform, decode, encode_keys
from kvkeep.kv_bits import EXPONENTS, TRANSFORMS
from kvkeep.models import key_transforms as measuring
from kvkeep.models.key_transforms import key_transforms

VOCABULARY, DIM, NEW = 61, 8, 6
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def made(config):
    torch.manual_seed(0)
    found = AutoModelForCausalLM.from_config(config).eval()
    for parameter in found.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return found


@functools.cache
def net():
    """A model in whose first layer a rotary pair of each KV head has large keys, and queries that make little of it."""
    config = LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=256)
    found = made(config)
    attention = found.model.layers[0].self_attn
    for head in range(2):
        for channel in (1, 5):
            attention.k_proj.weight.data[head * DIM + channel] *= 16
            for query_head in (2 * head, 2 * head + 1):
                attention.q_proj.weight.data[query_head * DIM + channel] /= 16
    return kvkeep.attach(found)


def random_ids():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (2, 128), generator=generator)


def means(vectors, rotation, channel):
    """The mean and the mean square of one channel of vectors as they are and at each later step, in plain loops."""
    first, second = channel % 4, channel % 4 + 4
    total = squares = count = 0
    for step in range(0, 2048, 128):
        angle = step * float(rotation.frequencies[first])
        for vector in vectors.tolist():
            a, b = vector[first], vector[second]
            turned = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
            total, squares, count = total + turned[channel // 4], squares + turned[channel // 4] ** 2, count + 1
    return total / count, squares / count


def test_the_exponents_are_those_of_the_definition():
    found, rotations = key_transforms(net()), rotations_for(net().config, "test", turns=True, foresees=False)
    exponents, normals = found[0]
    assert exponents.dtype == torch.int8
    tape = tapes(net(), random_ids())[0]
    for head in range(2):
        queries = tape.query[:, 2 * head : 2 * head + 2, 1:].flatten(0, 2)
        ratios = []
        for channel in range(DIM):
            mean, square = means(tape.keys[:, head, 1:].flatten(0, 1), rotations[0], channel)
            ratios.append(math.log2(max(square - mean**2, square / 64) / means(queries, rotations[0], channel)[1]) / 4)
        assert exponents[0, head].tolist() == [round(ratio - sum(ratios) / DIM) for ratio in ratios]
    assert (exponents[..., [1, 5]] >= 2).all()
    assert (exponents[..., [0, 2, 3, 4, 6, 7]] <= 0).all()
    assert torch.allclose(normals.square().sum(dim=-1), torch.tensor(2.0))


def test_they_are_measured_once_and_only_for_keys_of_4_bits(monkeypatch):
    calls, model = [], made(LlamaConfig(**SIZES, intermediate_size=48))
    kvkeep.attach(model)
    monkeypatch.setattr(measuring, "_measured", lambda model: calls.append(model) or {})
    for kv_bits in (None, "8", "k8v4", "4", "4"):
        cache = BoundedCache(model.config, "full", 20, kv_bits=kv_bits)
        model(input_ids=random_ids()[:, :9], past_key_values=cache)
        assert len(calls) == (kv_bits == "4")


def test_a_model_without_rotary_pairs_has_single_channels():
    model = made(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=100))
    model.transformer.h[0].attn.c_attn.weight.data[:, 32 + 3] *= 100  # a channel of the first head's keys
    found = key_transforms(kvkeep.attach(model))  # over texts that are no longer than the model's positions
    assert found.keys() == {0, 1}
    assert found[0].exponents[0, 0].argmax() == 3
    assert found[0].exponents[0, 0, 3] >= 2
    assert not found[1].exponents.any()


def test_a_model_that_cannot_read_random_tokens_has_no_exponents_and_no_error(monkeypatch):
    model = kvkeep.attach(made(LlamaConfig(**SIZES, intermediate_size=48)))

    def refuse(*given, **options):
        raise RuntimeError("these tokens mean nothing")

    monkeypatch.setattr(measuring, "handing_cache", refuse)
    assert key_transforms(model) == {}
    cache = BoundedCache(model.config, "full", 20, kv_bits="4")
    model(input_ids=random_ids()[:, :9], past_key_values=cache)
    assert not any(cache.bounded_layers()[0].store.per_row()[name].any() for name in TRANSFORMS)
    assert Engine(model, budget=20, rows=1, kv_bits=4).generate(request(1, 9))[0].token_ids


@pytest.mark.parametrize("dim", [6, 32, 64, 80, 128, 256])
def test_the_directions_of_most_keys_take_nothing_of_the_range(dim):
    """Keys along one direction, or two where they have two groups, are coded exactly, but for half precision."""
    g = torch.Generator().manual_seed(dim)
    keys = torch.randn(1, 2, 40, 2 if dim >= 128 else 1, generator=g) @ torch.randn(
        1, 2, 2 if dim >= 128 else 1, dim, generator=g
    )
    plain = KeyTransform(torch.zeros(1, 2, dim, dtype=torch.int8))
    squares = keys[0].transpose(1, 2) @ keys[0]
    transform = plain._replace(normals=measuring._normals(measuring._coded(squares, plain))[None])
    errors = [
        (each.restored(decode(encode_keys(keys, 4, each), torch.float32)) - keys).norm() / keys.norm()
        for each in (transform, plain)
    ]
    assert errors[0] < 2e-3 < 0.02 < errors[1]


@pytest.mark.parametrize("positions", ["true", "slot"])
def test_large_channels_cost_less(positions):
    """Against the same cache without exponents, by the error of what follows a text."""
    errors, ids = [], random_ids()[:, :40]
    for scaled in (True, False):
        outs = []
        for kv_bits in (None, "4"):
            cache = BoundedCache(net().config, "full", 64, kv_bits=kv_bits, positions=positions)
            run = functools.partial(net(), past_key_values=cache)
            if not scaled:
                cache.transform_keys = lambda transforms: None
            with torch.inference_mode():
                run(input_ids=ids[:, :30])
                outs.append(torch.cat([run(input_ids=ids[:, i : i + 1]).logits for i in range(30, 40)], dim=1))
        errors.append(float((outs[1] - outs[0]).square().mean()))
    assert errors[0] < 0.8 * errors[1]


def test_policies_and_copies_see_the_keys_themselves():
    ids = random_ids()[:, :20]
    plain, coded = (BoundedCache(net().config, "full", 32, kv_bits=kv_bits) for kv_bits in (None, "4"))
    for cache in (plain, coded):
        net()(input_ids=ids, past_key_values=cache)
    assert coded.bounded_layers()[0].store.per_row()[EXPONENTS].any()
    keys, copies = (cache.bounded_layers()[0].store.slots().keys[:, :, :20] for cache in (plain, coded))
    assert (copies - keys).norm() < 0.1 * keys.norm()


def strange():
    """Transforms that the model does not have."""
    found = key_transforms(net()).items()
    return {number: KeyTransform(torch.full_like(one.exponents, 3), one.normals.flip(-1)) for number, one in found}


def request(seed, length):
    prompt = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=NEW), ignore_end=True)


def alone(asked, **options):
    cache = BoundedCache(net().config, "h2o:recent=2", 16, kv_bits="4", **options)
    ids = torch.tensor([asked.prompt])
    out = net().generate(ids, past_key_values=cache, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return tuple(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize(
    "options", [{}, {"positions": "slot"}, {"head_budget": "ada"}, {"head_budget": "global"}], ids=str
)
def test_rows_of_an_engine_get_what_they_get_alone(options):
    engine = Engine(net(), policy="h2o:recent=2", budget=16, rows=3, kv_bits=4, **options)
    asked = [request(seed, 12 + 5 * seed) for seed in range(4)]  # one more than rows: a row is used again
    for one, result in zip(asked, engine.generate(asked), strict=True):
        assert result.token_ids == alone(one, **options)


@pytest.mark.parametrize("options", [{}, {"positions": "slot"}, {"head_budget": "ada"}], ids=str)
def test_a_file_is_read_with_its_own_exponents(options, tmp_path, monkeypatch):
    ids = random_ids()[:1, :40]
    cache = BoundedCache(net().config, "h2o:recent=2", 16, kv_bits="4", **options)
    net()(input_ids=ids[:, :20], past_key_values=cache)
    cache.snapshot().save(tmp_path / "memory")
    want = [net()(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in range(20, 26)]
    of_file = [layer.store.per_row() for layer in cache.bounded_layers().values()]

    others = strange()
    monkeypatch.setitem(measuring._known, net(), others)  # as another machine might round
    other = BoundedCache.from_snapshots(net().config, [Snapshot.load(tmp_path / "memory")])
    found = [net()(input_ids=ids[:, i : i + 1], past_key_values=other).logits for i in range(20, 26)]
    assert all(map(torch.equal, found, want))
    for layer, held in zip(other.bounded_layers().values(), of_file, strict=True):
        assert all(torch.equal(layer.store.per_row()[name], held[name]) for name in TRANSFORMS)
    other.reset()
    net()(input_ids=ids[:, :20], past_key_values=other)
    assert all((layer.store.per_row()[EXPONENTS] == 3).all() for layer in other.bounded_layers().values())


def test_a_row_that_held_a_file_is_used_again_with_the_exponents_of_the_model(tmp_path, monkeypatch):
    engine = Engine(net(), policy="h2o:recent=2", budget=16, rows=1, kv_bits=4)
    wanted = engine.generate(request(1, 20))[0].token_ids
    others = strange()
    with monkeypatch.context() as changed:
        changed.setitem(measuring._known, net(), others)
        cache = BoundedCache(net().config, "h2o:recent=2", 16, kv_bits="4")
        net()(input_ids=random_ids()[:1, :20], past_key_values=cache)
    cache.snapshot(tokens=random_ids()[0, :20]).save(tmp_path / "memory")
    held = Snapshot.load(tmp_path / "memory")
    sampling = SamplingParams(max_new_tokens=NEW)
    engine.generate(Request(prompt=random_ids()[0, 20:24].tolist(), snapshot=held, sampling=sampling, ignore_end=True))
    assert engine.generate(request(1, 20))[0].token_ids == wanted


def test_the_means_of_channels_count_where_no_reflection_takes_them_out():
    draw = torch.Generator().manual_seed(0)

    def exponents(dim):
        keys = torch.randn(1, 1, 400, dim, generator=draw)
        keys[..., 0] += 60.0
        found = measuring._Observer(None)._transform(torch.randn(1, 1, 400, dim, generator=draw), keys)
        assert found.normals.shape == (1, 1, int(dim == 8), dim)
        return found.exponents[0, 0]

    # two groups of 64 have offsets of their own, and a channel's mean is divided like its numbers
    assert exponents(128)[0] - exponents(128)[1] == round(math.log2(60.0**2) / 4)
    assert abs(exponents(8)[0] - exponents(8)[1]) < round(math.log2(60.0**2) / 4)
