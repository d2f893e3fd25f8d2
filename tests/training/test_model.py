"""The byte-level GPT: shapes, causality, isolation of documents, parameters."""

import dataclasses

import pytest
import torch

from flamia.training import GPT, PRESETS, ModelConfig, exact_attention
from flamia.training.data import VOCABULARY
from flamia.training.model import document_positions, rotary_table, rotate

CONFIG = ModelConfig(layers=2, width=64, head_dim=32, hidden=96)


def build(**changes):
    return GPT(dataclasses.replace(CONFIG, **changes), torch.Generator().manual_seed(0))


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def tokens(count, seed=0):
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, row, cu_seqlens, max_seqlen=64):
    return model(row, cu_seqlens, max_seqlen, exact_attention)


def test_logits_of_every_token():
    out = logits(build(), tokens(50), offsets(20, 30))
    assert out.shape == (50, VOCABULARY)
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()


def test_the_first_loss_is_that_of_a_guess():
    row = tokens(64)
    loss = build().loss(row, tokens(64, 1), offsets(64), 64, exact_attention).mean().item()
    assert abs(loss - torch.tensor(float(VOCABULARY)).log().item()) < 0.1


def test_a_token_changes_nothing_before_it_and_something_after():
    model, row = build(), tokens(48)
    before = logits(model, row, offsets(48))
    changed = row.clone()
    changed[30] = (row[30] + 1) % VOCABULARY
    after = logits(model, changed, offsets(48))
    torch.testing.assert_close(after[:30], before[:30], rtol=0, atol=1e-6)
    assert ((after - before).abs().amax(1)[30:] > 1e-5).all()


def test_a_document_does_not_know_its_neighbours():
    model, row = build(), tokens(60)
    packed = logits(model, row, offsets(13, 27, 20))
    changed = row.clone()
    changed[13:40] = tokens(27, 5)
    other = logits(model, changed, offsets(13, 27, 20))
    torch.testing.assert_close(other[:13], packed[:13], rtol=0, atol=1e-6)
    torch.testing.assert_close(other[40:], packed[40:], rtol=0, atol=1e-6)
    alone = logits(model, row[13:40], offsets(27))
    torch.testing.assert_close(packed[13:40], alone, rtol=0, atol=1e-4)


def test_positions_restart_at_documents():
    document, position = document_positions(torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32), 5)
    assert document.tolist() == [1, 1, 1, 3, 3]
    assert position.tolist() == [0, 1, 2, 0, 1]


def test_rotated_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(0))

    def product(i, j):
        a = rotate(q, rotary_table(torch.tensor([i]), 32, 1e4))
        b = rotate(k, rotary_table(torch.tensor([j]), 32, 1e4))
        return (a * b).sum().item()

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)
    assert product(0, 0) == pytest.approx((q * k).sum().item(), abs=1e-6)


def test_attention_receives_bf16_of_the_models_shape():
    seen = []

    def attend(q, k, v, cu_seqlens, max_seqlen):
        seen.append((q.shape, q.dtype, k.dtype, v.dtype, cu_seqlens.dtype, max_seqlen))
        return exact_attention(q, k, v, cu_seqlens, max_seqlen)

    build()(tokens(40), offsets(40), 40, attend)
    assert seen == [((40, 2, 32), torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32, 40)] * 2


def test_matrices_decay_and_nothing_else():
    model = build()
    decayed, free = model.parameter_groups(0.3)
    assert decayed["weight_decay"] == 0.3
    assert free["weight_decay"] == 0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = [names[id(parameter)] for parameter in decayed["params"]]
    rest = [names[id(parameter)] for parameter in free["params"]]
    assert sorted(chosen + rest) == sorted(names.values())
    assert all("norm" in name or "embedding" in name for name in rest)
    assert not any("norm" in name or "embedding" in name for name in chosen)


def test_recomputation_changes_no_gradient():
    gradients = []
    for recompute in (False, True):
        model = build(recompute=recompute)
        model.loss(tokens(40), tokens(40, 1), offsets(25, 15), 40, exact_attention).mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_initial_values_are_scaled_as_asked():
    plain, scaled = build(), build(value_gain=7.0)
    a, b = plain.layers[0].attention.qkv.weight, scaled.layers[0].attention.qkv.weight
    assert torch.equal(b[:128], a[:128])
    torch.testing.assert_close(b[128:], 7 * a[128:])
    spread = build(embedding_spread=1.0).embedding.weight
    assert spread.abs().log().std() > plain.embedding.weight.abs().log().std() + 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width is 0"),
        ({"layers": -1}, "layers is -1"),
        ({"head_dim": 33}, "head_dim is 33"),
        ({"width": 80}, "width is 80"),
        ({"window": 0}, "window is 0"),
        ({"embedding_spread": -1.0}, "embedding_spread is -1"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_presets_are_what_they_say():
    paper = PRESETS["paper"].model
    assert (paper.layers, paper.width, paper.head_dim, PRESETS["paper"].context) == (6, 1024, 128, 1024)
    count = sum(parameter.numel() for parameter in GPT(PRESETS["tiny"].model).parameters())
    assert count < 3_000_000
    assert all(preset.model.head_dim in (32, 64) for name, preset in PRESETS.items() if name not in ("paper", "1b"))
    assert not PRESETS["paper"].autocast
    large = PRESETS["1b"].model
    assert (large.layers, large.width, large.heads, large.head_dim) == (16, 2048, 16, 128)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPT(large).parameters())
    assert 1.0e9 < count < 1.3e9
